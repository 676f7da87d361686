"""What every route works with, and whether it may work at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from tidelane.engine.channel import Facts, LoggedDecision
from tidelane.engine.http.config import Limits
from tidelane.engine.http.errors import ApiError, Busy, Unavailable
from tidelane.engine.http.link import LoopLink
from tidelane.engine.http.metrics import Metrics
from tidelane.engine.http.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """The loop's facts, with the tokenizer that they point to."""

    facts: Facts
    tokenizer: Tokenizer


class Service:
    """State of one front. Lives on one asyncio loop."""

    def __init__(
        self,
        served_name: str,
        limits: Limits,
        link: LoopLink,
        metrics: Metrics,
        workers: Executor,
        monotonic_s: Callable[[], float],
        unix_s: Callable[[], float],
        random_bits: Callable[[int], int],
    ) -> None:
        self.served_name = served_name
        self.limits = limits
        self.link = link
        self.metrics = metrics
        self.monotonic_s = monotonic_s
        self.unix_s = unix_s
        self.random_bits = random_bits
        self.model: Model | None = None
        self.core_lost = False
        self.open_calls = 0
        self._workers = workers

    def serving_model(self) -> Model:
        """The model, if a request can be taken now; raises what the client is to hear if not."""
        error = self.refusal()
        if error is not None:
            raise error
        assert self.model is not None
        if self.open_calls >= self.limits.open_calls:
            message = f"{self.open_calls} requests are open, the most this server takes."
            raise Busy(message, code="queue_full", retry_after_s=1)
        return self.model

    async def decisions(self, limit: int) -> tuple[LoggedDecision, ...]:
        """The engine's last `limit` decisions, the newest last; raises what the client is to hear if it tells none."""
        if self.core_lost:
            raise core_lost()
        if self.link.heartbeat is None:
            raise Unavailable("The engine has decided nothing yet: it loads.", code="loading", retry_after_s=2)
        try:
            async with asyncio.timeout(self.limits.heartbeat_age_s):
                return await self.link.decisions(limit)
        except TimeoutError as error:
            raise Unavailable("The engine does not answer.", code="engine_silent", retry_after_s=5) from error

    def refusal(self) -> ApiError | None:
        """Why no request can be taken now."""
        if self.core_lost:
            return core_lost()
        if self.model is None:
            return Unavailable("The model is still loading.", code="loading", retry_after_s=2)
        if self.link.heartbeat is not None and self.link.heartbeat.draining:
            return Unavailable("This server finishes its work and stops.", code="draining", retry_after_s=5)
        return None

    def unready(self) -> str | None:
        """Why `/ready` says no; None if this server is warm, open, and makes progress."""
        error = self.refusal()
        if error is not None:
            return error.message
        beat = self.link.heartbeat
        now_s = self.monotonic_s()
        if beat is None or now_s - beat.time_s > self.limits.heartbeat_age_s:
            return "The engine gives no sign of life."
        if self.link.progress_s is not None and now_s - self.link.progress_s > self.limits.step_age_s:
            return f"The engine has work but made no step for {now_s - self.link.progress_s:.0f} s."
        return None

    async def off_loop(self, work: Callable[[], _T], chars: int) -> _T:
        """Runs `work`, which goes through `chars` characters, without keeping the event loop for long."""
        if chars <= self.limits.inline_chars:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


def core_lost() -> ApiError:
    return Unavailable("The engine has stopped.", code="engine_stopped", retry_after_s=2)
