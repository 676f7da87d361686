"""All backends: who they are, found out again and again, and what each says of itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from tidelane.engine.load import Load
from tidelane.router.address import Address
from tidelane.router.ask import Ask
from tidelane.router.backend import Backend
from tidelane.router.choice import Fitness, Ranked, choose
from tidelane.router.upstream import BrokenOff, CannotConnect, Outgoing, exchange

_log = logging.getLogger(__name__)

_LOAD: Final = Outgoing("GET", b"/load")
_MOST_LOAD_BYTES: Final = 1 << 16
# A poll takes milliseconds of work here: with many backends each is asked less often, but well within STALE_S.
_POLL_SPACING_S: Final = 0.02
LONGEST_POLL_S: Final = 1.5

Resolve = Callable[[Address], Awaitable[Iterable[Address]]]


class NotAnEngine(Exception):
    """Something else listens there."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often what is asked, and how long an answer may take. A backend that takes connections and has answered no
    poll for `silent_s` hangs."""

    poll_s: float = 0.25
    poll_timeout_s: float = 1.0
    resolve_s: float = 2.0
    connect_timeout_s: float = 2.0
    silent_s: float = 10.0


class Fleet:
    """`fixed` backends stay for good; those of `names` are what `resolve` says they are. `gone` hears of each that no
    longer is. Lives on one event loop."""

    def __init__(
        self,
        fixed: Sequence[Address],
        names: Sequence[Address],
        rhythm: Rhythm,
        monotonic_s: Callable[[], float],
        resolve: Resolve | None = None,
        gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._rhythm = rhythm
        self._monotonic_s = monotonic_s
        self._resolve = _resolve if resolve is None else resolve
        self._gone = gone
        self._fixed = tuple(fixed)
        self._names = tuple(names)
        self._found: dict[Address, frozenset[Address]] = {}
        self._backends: dict[str, Backend] = {}
        self._complaints: dict[str, str] = {}
        self._polling: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._settle()

    @property
    def backends(self) -> Mapping[str, Backend]:
        return MappingProxyType(self._backends)

    @property
    def rhythm(self) -> Rhythm:
        return self._rhythm

    def rank(self, ask: Ask) -> tuple[Ranked, ...]:
        """Those that may serve what is asked, the best first."""
        now_s = self._monotonic_s()
        return choose(ask, [each.view(ask, now_s) for each in self._backends.values() if each.serves(ask.model)])

    def models(self) -> dict[str, list[Load]]:
        """By name, what each backend that serves it said last."""
        found: dict[str, list[Load]] = {}
        for backend in self._backends.values():
            if backend.load is not None:
                found.setdefault(backend.load.model, []).append(backend.load)
        return found

    def healthy(self) -> int:
        now_s = self._monotonic_s()
        return sum(each.fitness(now_s) is Fitness.HEALTHY for each in self._backends.values())

    # ---- finding out ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Asks everyone once, then goes on asking."""
        await asyncio.gather(*(self.look_up(name) for name in self._names))
        await asyncio.gather(*(self.poll(each) for each in list(self._backends.values())))
        self._tasks = [asyncio.create_task(self._keep_looking_up(name)) for name in self._names]
        self._tasks.append(asyncio.create_task(self._keep_polling()))

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._polling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look_up(self, name: Address) -> None:
        """Where it cannot be looked up, those found last stay: they know best themselves whether they are there."""
        try:
            self._found[name] = frozenset(await self._resolve(name))
        except OSError as error:
            self._complain(name.name, f"cannot look up {name.host}: {error}")
            return
        self._settled(name.name)
        self._settle()

    async def poll(self, backend: Backend) -> None:
        """Ask it how it fares."""
        try:
            async with asyncio.timeout(self._rhythm.poll_timeout_s):
                load = await self._ask(backend)
        except CannotConnect as error:
            backend.gone()
            self._complain(backend.name, f"no connection: {error}")
        except TimeoutError:
            # One poll is no proof; without news for long it is in doubt by itself.
            self._complain(backend.name, "does not answer")
            backend.hangs(self._rhythm.silent_s, self._monotonic_s())
        except (BrokenOff, NotAnEngine) as error:
            self._complain(backend.name, f"tells no load: {error}")
        else:
            backend.heard(load, self._monotonic_s())
            self._settled(backend.name)

    async def _ask(self, backend: Backend) -> Load:
        async with exchange(backend.address, _LOAD, self._rhythm.poll_timeout_s) as answer:
            body = await answer.body(_MOST_LOAD_BYTES)
            if answer.status != 200:
                raise NotAnEngine(f"GET /load answers {answer.status}: is it a Tidelane engine?")
        try:
            return msgspec.json.decode(body, type=Load)
        except (msgspec.DecodeError, ValueError) as error:
            raise NotAnEngine(f"GET /load answers what is no load: {error}") from error

    async def _keep_looking_up(self, name: Address) -> None:
        while True:
            await asyncio.sleep(self._rhythm.resolve_s)
            await self.look_up(name)

    async def _keep_polling(self) -> None:
        """One question at a time to each, so that one that hangs holds up itself alone."""
        while True:
            for name, backend in self._backends.items():
                task = self._polling.get(name)
                if task is None or task.done():
                    self._polling[name] = asyncio.create_task(self.poll(backend))
            for name in self._polling.keys() - self._backends.keys():
                self._polling.pop(name).cancel()
            await asyncio.sleep(poll_interval_s(self._rhythm.poll_s, len(self._backends)))

    def _settle(self) -> None:
        """Make the backends those that are wanted. Who is no longer keeps what it was sent: it ends by itself."""
        wanted = {each.name: each for each in (*self._fixed, *(a for found in self._found.values() for a in found))}
        for name in self._backends.keys() - wanted.keys():
            _log.info("backend gone: %s", name)
            del self._backends[name]
            self._gone(name)
        for name in sorted(wanted.keys() - self._backends.keys()):
            _log.info("backend: %s", name)
            self._backends[name] = Backend(wanted[name])

    def _complain(self, name: str, what: str) -> None:
        """Once, until it is over or something else."""
        if self._complaints.get(name) != what:
            self._complaints[name] = what
            _log.warning("%s: %s", name, what)

    def _settled(self, name: str) -> None:
        if self._complaints.pop(name, None) is not None:
            _log.info("%s: answers again", name)


def poll_interval_s(wanted_s: float, backends: int) -> float:
    return max(wanted_s, min(LONGEST_POLL_S, backends * _POLL_SPACING_S))


async def _resolve(name: Address) -> Iterable[Address]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name.host, name.port, type=1)  # SOCK_STREAM
    return {Address(str(address[0]), name.port) for *_, address in found}
