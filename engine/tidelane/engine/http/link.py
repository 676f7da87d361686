"""The front's end of the channel on an asyncio loop: requests out, and each message to whom it concerns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from tidelane.engine.channel import (
    Abort,
    Accepted,
    Decisions,
    DecisionsWanted,
    Endpoint,
    Facts,
    FrontFailed,
    FrontReady,
    Heartbeat,
    LoggedDecision,
    Refused,
    Submit,
    ToFront,
    Tokens,
    ToLoop,
)
from tidelane.engine.http.errors import ApiError
from tidelane.engine.request import FinishReason, Request

# So that a burst of messages does not keep the event loop from writing what it already has.
_MESSAGES_PER_TURN = 256


class Listener(Protocol):
    """Hears of one request. After a refusal, a last `tokens`, `lost`, or an abort of ours, it hears nothing more."""

    def accepted(self) -> None: ...
    def refused(self, message: Refused) -> None: ...
    def tokens(self, message: Tokens) -> None: ...
    def lost(self, error: ApiError) -> None: ...


class LoopLink:
    """Routes the loop's messages to listeners by request id. Lives on one asyncio loop."""

    def __init__(
        self,
        endpoint: Endpoint[ToLoop, ToFront],
        event_loop: asyncio.AbstractEventLoop,
        on_facts: Callable[[Facts], None],
    ) -> None:
        self._endpoint = endpoint
        self._event_loop = event_loop
        self._on_facts = on_facts
        self._listeners: dict[str, Listener] = {}
        self._asked: dict[int, asyncio.Future[tuple[LoggedDecision, ...]]] = {}
        self._numbers = itertools.count()
        self._turn: asyncio.Handle | None = None
        self.heartbeat: Heartbeat | None = None
        # When the loop last made a step or had nothing to do; its own clock, which is everyone's (CLOCK_MONOTONIC).
        self.progress_s: float | None = None

    def start(self) -> None:
        self._event_loop.add_reader(self._endpoint.fileno(), self._drain)
        self._drain()

    def stop(self) -> None:
        self._event_loop.remove_reader(self._endpoint.fileno())
        if self._turn is not None:
            self._turn.cancel()
        self._endpoint.close()

    def submit(self, request: Request, listener: Listener) -> None:
        self._listeners[request.id] = listener
        self._endpoint.send(Submit(request))

    def ready(self) -> None:
        """Tell the loop that requests can come."""
        self._endpoint.send(FrontReady())

    def failed(self, reason: str) -> None:
        """Tell the loop that no request can ever come."""
        self._endpoint.send(FrontFailed(reason))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORTED) -> None:
        """Whatever state it is in. Messages on their way here are dropped, so its listener hears nothing more."""
        if self._listeners.pop(request_id, None) is not None:
            self._endpoint.send(Abort(request_id, reason))

    async def decisions(self, limit: int) -> tuple[LoggedDecision, ...]:
        """The loop's last `limit` decisions, the newest last. Raises ApiError when the loop is lost meanwhile."""
        number = next(self._numbers)
        answer: asyncio.Future[tuple[LoggedDecision, ...]] = self._event_loop.create_future()
        self._asked[number] = answer
        self._endpoint.send(DecisionsWanted(number, limit))
        try:
            return await answer
        finally:
            del self._asked[number]

    def lose(self, error: ApiError) -> None:
        """The loop is dead: every request ends here."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lost(error)

    def _drain_soon(self) -> None:
        if self._turn is None:
            self._turn = self._event_loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        emptied = False
        try:
            for _ in range(_MESSAGES_PER_TURN):
                message = self._endpoint.receive(0)
                if message is None:
                    emptied = True
                    return
                self._deliver(message)
        finally:
            # The descriptor is edge-triggered: what stays unread now would wake nobody.
            if not emptied:
                self._drain_soon()

    def _deliver(self, message: ToFront) -> None:
        match message:
            case Tokens():
                listener = self._listeners.get(message.request_id)
                if listener is not None:
                    if message.finish is not None:
                        del self._listeners[message.request_id]
                    listener.tokens(message)
            case Accepted():
                listener = self._listeners.get(message.request_id)
                if listener is not None:
                    listener.accepted()
            case Refused():
                listener = self._listeners.pop(message.request_id, None)
                if listener is not None:
                    listener.refused(message)
            case Heartbeat():
                before = self.heartbeat
                idle = message.running + message.waiting == 0
                if before is None or idle or message.steps != before.steps:
                    self.progress_s = message.time_s
                self.heartbeat = message
            case Decisions():
                self._answer(message)
            case Facts():
                self._on_facts(message)

    def _answer(self, message: Decisions) -> None:
        answer = self._asked.get(message.number)
        if answer is not None and not answer.done():  # whoever asked may have given up
            answer.set_result(message.decisions)
