"""Which services to look at next: names that coalesce, one worker a name, failures spaced out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from tidelane.operator.errors import Retry
from tidelane.operator.resources import ObjectRef

log = logging.getLogger(__name__)

_FIRST_DELAY_S: Final = 0.2
_LONGEST_DELAY_S: Final = 60.0


class Meter(Protocol):
    def looked(self, late_s: float, took_s: float, error: BaseException | None) -> None:
        """A look began so late and took so long, with that error or none."""
        ...


class NoMeter:
    def looked(self, late_s: float, took_s: float, error: BaseException | None) -> None:
        pass


class WorkQueue:
    """`work` answers in how many seconds to come again, or None. Times are those of the event loop."""

    def __init__(
        self, work: Callable[[ObjectRef], Awaitable[float | None]], workers: int = 8, meter: Meter | None = None
    ) -> None:
        self._work = work
        self._workers = workers
        self._meter = meter or NoMeter()
        self._due_s: dict[ObjectRef, float] = {}
        self._running: set[ObjectRef] = set()
        self._failures: Counter[ObjectRef] = Counter()
        self._wake = asyncio.Event()

    def add(self, ref: ObjectRef, after_s: float = 0.0) -> None:
        """Asks for a look in `after_s` seconds at the latest. Asking while it is being looked at means once more."""
        due_s = asyncio.get_running_loop().time() + after_s
        if due_s < self._due_s.get(ref, float("inf")):
            self._due_s[ref] = due_s
            self._wake.set()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing is due now; something may be later."""
        now_s = asyncio.get_running_loop().time()
        return not self._running and all(due_s > now_s for due_s in self._due_s.values())

    @property
    def waiting(self) -> int:
        """Names that are due, and that nobody looks at yet."""
        now_s = asyncio.get_running_loop().time()
        return sum(due_s <= now_s for due_s in self._due_s.values())

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for ref in self._startable():
                    due_s = self._due_s.pop(ref)
                    self._running.add(ref)
                    tasks.create_task(self._look_at(ref, due_s), name=f"reconcile {ref}")
                await self._next_due()

    def _startable(self) -> list[ObjectRef]:
        now_s = asyncio.get_running_loop().time()
        due = [ref for ref, due_s in self._due_s.items() if due_s <= now_s and ref not in self._running]
        return due[: self._workers - len(self._running)]

    async def _next_due(self) -> None:
        self._wake.clear()
        # With every worker busy only the end of one, which wakes, can start another.
        free = len(self._running) < self._workers
        due_s = min((at_s for ref, at_s in self._due_s.items() if ref not in self._running), default=None)
        try:
            async with asyncio.timeout_at(due_s if free else None):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _look_at(self, ref: ObjectRef, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        failure: Exception | None = None
        try:
            again_s = await self._work(ref)
        except Retry as error:
            failure = error
            self._again(ref, error.after_s)
            log.info("%s: will retry: %s", ref, error)
        except Exception as error:
            # The outermost loop for one service: a fault in one must not stop the others.
            failure = error
            log.exception("%s: failed", ref)
            self._again(ref, None)
        else:
            del self._failures[ref]
            if again_s is not None:
                self.add(ref, again_s)
        finally:
            self._running.discard(ref)
            self._wake.set()
            self._meter.looked(began_s - due_s, loop.time() - began_s, failure)

    def _again(self, ref: ObjectRef, after_s: float | None) -> None:
        self._failures[ref] += 1
        backoff_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(self._failures[ref] - 1, 16))
        # Even a retry that should come at once is spaced out when it fails time after time.
        self.add(ref, backoff_s if after_s is None or self._failures[ref] > 3 else after_s)
