"""One HTTP request's sequences, from submission to the last of them, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidelane.engine.channel import RefusalReason, Refused, Tokens
from tidelane.engine.http.choice import Choice, Delta
from tidelane.engine.http.errors import ApiError, BadRequest, Busy, EngineFailed, SlowReader, Unavailable
from tidelane.engine.http.link import LoopLink
from tidelane.engine.http.metrics import Metrics, RequestRecord
from tidelane.engine.request import FinishReason


class Call:
    """Several choices that succeed or fail together.

    Ends in one of three ways: `finished`, when every choice has; `error`, when one could not; closed, when the client
    left. Each way aborts what still runs in the loop. `unread_limit` bounds the tokens that wait for a slow reader.
    """

    def __init__(self, link: LoopLink, metrics: Metrics, choices: Sequence[Choice], unread_limit: int | None) -> None:
        self.choices = choices
        self.error: ApiError | None = None
        self.closed = False
        self._link = link
        self._unread_limit = unread_limit
        self._changed = asyncio.Event()
        self._lines = [_Line(self, choice, metrics.begin(choice.request)) for choice in choices]

    def open(self) -> None:
        for line in self._lines:
            self._link.submit(line.choice.request, line)

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def over(self) -> bool:
        return self.closed or self.error is not None or self.finished

    async def admitted(self) -> bool:
        """Waits until the loop took every sequence; False: the client left. Raises what one was refused with."""
        while not self.over and not all(line.admitted for line in self._lines):
            await self.changed()
        return self._answerable()

    async def ended(self) -> bool:
        """Waits until every choice finished; False: the client left. Raises if one failed."""
        while not self.over:
            await self.changed()
        return self._answerable()

    def _answerable(self) -> bool:
        if self.error is not None:
            raise self.error
        return not self.closed

    async def changed(self) -> None:
        """Waits until something happened since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def take(self) -> list[Delta]:
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    def close(self) -> None:
        """The client left, or its answer is complete; safe at any time and more than once."""
        self.closed = True
        self._stop_lines(FinishReason.ABORTED)

    def fail(self, error: ApiError) -> None:
        if not self.over:
            self.error = error
            self._stop_lines(FinishReason.ERROR)

    def _stop_lines(self, reason: FinishReason) -> None:
        for line in self._lines:
            line.stop(reason)
        self.wake()

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self._link.abort(request_id, reason)

    def check_reader(self, choice: Choice) -> None:
        if self._unread_limit is not None and choice.unread_tokens > self._unread_limit:
            message = f"The stream was not read: {choice.unread_tokens} tokens were waiting."
            self.fail(SlowReader(message, code="slow_reader"))

    def wake(self) -> None:
        self._changed.set()


class _Line:
    """The listener of one choice of a call."""

    def __init__(self, call: Call, choice: Choice, record: RequestRecord) -> None:
        self.choice = choice
        self.admitted = False
        self._call = call
        self._record = record

    def accepted(self) -> None:
        self.admitted = True
        self._call.wake()

    def refused(self, message: Refused) -> None:
        self._record.refused(message.reason)
        self._call.fail(_refusal(message))

    def tokens(self, message: Tokens) -> None:
        self.admitted = True
        self._record.tokens(message)
        if message.finish in (FinishReason.ERROR, FinishReason.ABORTED):
            self._record.end(FinishReason.ERROR)
            self._call.fail(EngineFailed(message.error or "The engine ended this request.", code="engine_error"))
            return
        self.choice.add(message)
        if self.choice.finish is not None:
            if message.finish is None:  # a stop string, which the loop knows nothing of
                self._call.abort(self.choice.request.id, FinishReason.STOP)
            self._record.end(self.choice.finish, message.timeline)
        self._call.check_reader(self.choice)
        self._call.wake()

    def lost(self, error: ApiError) -> None:
        self._call.fail(error)

    def stop(self, reason: FinishReason) -> None:
        if self.choice.finish is None:
            self._call.abort(self.choice.request.id, FinishReason.ABORTED)
            self._record.end(reason)


def _refusal(message: Refused) -> ApiError:
    match message.reason:
        case RefusalReason.QUEUE_FULL:
            return Busy(message.message, code="queue_full", retry_after_s=message.retry_after_s or 1.0)
        case RefusalReason.WOULD_BE_LATE:
            return Busy(message.message, code="would_be_late", retry_after_s=message.retry_after_s or 1.0)
        case RefusalReason.NEVER_FITS:
            return BadRequest(message.message, code="kv_pool_exceeded")
        case RefusalReason.DRAINING:
            return Unavailable(message.message, code="draining", retry_after_s=message.retry_after_s or 1.0)
