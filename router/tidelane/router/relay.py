"""One request on its way: backends are asked until one answers, and its answer goes on as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from tidelane.engine.http.errors import ApiError, EngineFailed
from tidelane.router.ask import Ask
from tidelane.router.backend import Backend, Sent
from tidelane.router.choice import Ranked
from tidelane.router.client import Client
from tidelane.router.fleet import Fleet
from tidelane.router.metrics import ANSWERED, CLIENT_LEFT, LOST, Metrics
from tidelane.router.retries import Ended, Refusal, Try, last_word, next_backend
from tidelane.router.upstream import Answer, BrokenOff, CannotConnect, Outgoing, exchange

_log = logging.getLogger(__name__)

_MOST_REFUSAL_BYTES: Final = 1 << 16
# Of an answer that is not a stream: it is held until it is whole, so that it can be asked for again until then.
_MOST_WHOLE_BYTES: Final = 1 << 28
_ERROR: Final = b'data: {"error"'
# What a front says in the stead of a first token when its engine has died under the request.
_STOPPED: Final = b'"engine_stopped"'


class Relay:
    """Asks at most `most_tries` backends of `fleet`."""

    def __init__(self, fleet: Fleet, metrics: Metrics, monotonic_s: Callable[[], float], most_tries: int) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        self._most_tries = most_tries

    async def relay(self, ask: Ask, outgoing: Outgoing, client: Client) -> None:
        """Raises ApiError where no backend answers and nothing has been sent."""
        tries: list[Try] = []
        while (ranked := next_backend(self._fleet.rank(ask), tries, self._most_tries)) is not None:
            self._metrics.chosen(ask, ranked, tries[-1].ended if tries else None)
            backend = self._fleet.backends[ranked.name]
            asked = _Asked(backend, ranked, ask, self._monotonic_s())
            ended = await self._try(asked, outgoing, client)
            if ended is None:
                return
            tries.append(ended)
            self._metrics.ended(backend.name, ended.ended.value)
            _log.info("no answer: request=%s backend=%s why=%s", _name(outgoing), backend.name, ended.ended.value)
        word = last_word(tries)
        if isinstance(word, ApiError):
            raise word
        await client.refused(word)

    async def _try(self, asked: _Asked, outgoing: Outgoing, client: Client) -> Try | None:
        """None: the client has its answer, as far as it came."""
        backend = asked.backend
        with backend.holding(asked.ask, asked.ranked.resident_tokens, asked.at_s) as sent:
            try:
                async with (
                    _patient(sent, client),
                    exchange(backend.address, outgoing, self._fleet.rhythm.connect_timeout_s) as answer,
                ):
                    return await self._take(asked, answer, client)
            except CannotConnect:
                backend.gone()
                return self._failed(asked, Ended.UNREACHABLE)
            except BrokenOff as error:
                ended = self._failed(asked, Ended.BROKEN_OFF)
                if not client.begun:
                    return ended
                self._metrics.ended(backend.name, LOST)
                _log.warning("stream lost: request=%s backend=%s: %s", _name(outgoing), backend.name, error)
                await client.break_off(_lost(backend))
            except asyncio.CancelledError:
                self._metrics.ended(backend.name, CLIENT_LEFT)
                raise
        return None

    async def _take(self, asked: _Asked, answer: Answer, client: Client) -> Try | None:
        backend = asked.backend
        if answer.status in (429, 503):
            body = await answer.body(_MOST_REFUSAL_BYTES)
            refusal = Refusal(answer.status, answer.headers, body, _retry_after_s(answer))
            if answer.status == 503:
                backend.closed()
            return Try(backend.name, Ended.BUSY if answer.status == 429 else Ended.CLOSED, refusal)
        if not answer.header(b"content-type").startswith(b"text/event-stream"):
            body = await answer.body(_MOST_WHOLE_BYTES)
            self._judged(backend, well=answer.status < 500)
            await client.whole(answer.status, list(answer.headers), body)
            self._metrics.ended(backend.name, ANSWERED)
            return None
        return await self._stream(asked, answer, client)

    async def _stream(self, asked: _Asked, answer: Answer, client: Client) -> Try | None:
        """The head waits for the first piece, which an engine sends with the first token: until then nothing is lost
        with the backend."""
        async for piece in answer.pieces():
            if not client.begun:
                if piece.startswith(_ERROR) and _STOPPED in piece:
                    raise BrokenOff("its engine has stopped")
                self._judged(asked.backend, well=not piece.startswith(_ERROR))
                self._first_byte(asked)
                await client.begin(answer.status, list(answer.headers))
            await client.piece(piece)
        if not client.begun:
            raise BrokenOff("a stream without an event")
        await client.end()
        self._metrics.ended(asked.backend.name, ANSWERED)
        return None

    def _first_byte(self, asked: _Asked) -> None:
        now_s = self._monotonic_s()
        asked.backend.measured(asked.ranked.ttft_s, now_s - asked.at_s, now_s)
        self._metrics.first_byte(asked.ranked.ttft_s, now_s - asked.at_s)

    def _failed(self, asked: _Asked, ended: Ended) -> Try:
        self._judged(asked.backend, well=False)
        return Try(asked.backend.name, ended)

    def _judged(self, backend: Backend, *, well: bool) -> None:
        if well:
            backend.succeeded()
        else:
            backend.failed(self._monotonic_s())


@asynccontextmanager
async def _patient(sent: Sent, client: Client) -> AsyncIterator[None]:
    """For as long as it takes, unless the backend is given up before the client has been sent anything. Raises
    BrokenOff."""
    try:
        async with asyncio.timeout(None) as patience:
            loop = asyncio.get_running_loop()
            sent.give_up = lambda: None if client.begun else patience.reschedule(loop.time())
            yield
    except TimeoutError as error:
        raise BrokenOff("it gives no sign of life") from error


@dataclass(frozen=True, slots=True)
class _Asked:
    backend: Backend
    ranked: Ranked
    ask: Ask
    at_s: float


def _lost(backend: Backend) -> ApiError:
    return EngineFailed(
        f"The replica {backend.name} broke off in the middle of this answer. Send the request again.",
        code="backend_lost",
    )


def _retry_after_s(answer: Answer) -> float | None:
    """Whole seconds are what our engines say; an HTTP date from something else counts as nothing said."""
    text = answer.header(b"retry-after")
    if not (text.isdigit() and len(text) <= 9):
        return None
    return float(text)


def _name(outgoing: Outgoing) -> str:
    named = next((value for name, value in outgoing.headers if name == b"x-request-id"), b"")
    return named.decode("latin-1")
