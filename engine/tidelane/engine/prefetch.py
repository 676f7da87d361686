"""KV is brought up before its conversation goes on: whose, when, and in whose place."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import msgspec

from tidelane.engine.kv.cache import Holding, KVCache
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import Asker, Unused
from tidelane.engine.kv.rhythm import MOST_PAUSES, Pauses, Window

# Silent conversations that are remembered, and pauses: hundreds of bytes each.
REMEMBERED_CONVERSATIONS = 4096
REMEMBERED_PAUSES = 512
# At once, so that a prompt that has come never waits behind much that may not be needed.
PORTION_BLOCKS = 32
# Before the window begins, besides the time that a fetch takes.
LEAD_S = 1.0
# What makes room must be less likely to be needed by so much: who brings up in vain has copied for nothing.
TIMES_AS_LIKELY = 2.0


class LookAhead(Protocol):
    """Told by the ledger of all that comes and ends."""

    def came(self, name: str, keys: Sequence[Key], at_s: float) -> None:
        """A prompt of these whole blocks, for the first time, before anything is looked for."""
        ...

    def ended(self, name: str, holding: Holding, by: Asker) -> None:
        """Its request has ended, and holds this for the last time."""
        ...

    def fetched(self, key: Key) -> None:
        """A fetch has ended, well or not."""
        ...

    def act(self, now_s: float, *, room_is_short: bool) -> None:
        """Bring up what is due. Copies are the mover's, as all are."""
        ...

    @property
    def next_s(self) -> float | None:
        """When something is due that was not when it last acted."""
        ...

    @property
    def busy(self) -> bool:
        """Something is on its way up, and more may follow it."""
        ...


class NoLookAhead:
    """What is below the device stays there until it is asked for."""

    next_s: float | None = None
    busy = False

    def __init__(self, cache: KVCache) -> None:
        """Which stays as it is."""

    def came(self, name: str, keys: Sequence[Key], at_s: float) -> None:
        """Nothing is foreseen."""

    def ended(self, name: str, holding: Holding, by: Asker) -> None:
        """Nothing is foreseen."""

    def fetched(self, key: Key) -> None:
        """It was for a prompt that waits."""

    def act(self, now_s: float, *, room_is_short: bool) -> None:
        """There is nothing to do."""


class _Silent(msgspec.Struct):
    """A conversation between two turns, which paused so before, and when it should go on. `keys` are brought up."""

    last: Key
    by: Asker
    since_s: float
    pauses_s: tuple[float, ...]
    window: Window | None = None
    over: bool = False
    keys: list[Key] = []


class _Bringing(msgspec.Struct):
    """What is under way for a guess: `coming` from the disk, and then to the device, which `holding` has blocks of."""

    silent: _Silent
    coming: set[Key] = set()
    holding: Holding | None = None


class Prefetcher:
    """A conversation is known by the last whole block of its prompt; a prompt that begins with that goes on from it,
    and only the first such one counts: what many begin with is no conversation.

    `fetch_s` predicts the fetch of so many blocks from the disk.
    """

    def __init__(self, cache: KVCache, fetch_s: Callable[[int], float], clock: Callable[[], float]) -> None:
        self._cache = cache
        self._fetch_s = fetch_s
        self._clock = clock
        self._pauses = Pauses(REMEMBERED_PAUSES)
        self._talking: dict[str, tuple[Key, tuple[float, ...]]] = {}  # by request under way
        self._silent: OrderedDict[Key, _Silent] = OrderedDict()
        self._ends_s: deque[float] = deque(maxlen=REMEMBERED_CONVERSATIONS)  # when the last requests ended
        self._numbers = count()
        self._due: list[tuple[float, int, _Silent]] = []  # a heap
        self._guesses: list[tuple[float, int, _Silent]] = []  # a heap, by when they have proved wrong
        self._bringing: _Bringing | None = None

    @property
    def next_s(self) -> float | None:
        return self._due[0][0] if self._due else None

    @property
    def busy(self) -> bool:
        return self._bringing is not None

    def came(self, name: str, keys: Sequence[Key], at_s: float) -> None:
        if not keys:
            return
        before = next((key for key in reversed(keys) if key in self._silent), None)
        pauses_s: tuple[float, ...] = ()
        if before is not None:
            silent = self._silent.pop(before)
            pause_s = max(0.0, at_s - silent.since_s)
            self._pauses.went_on(silent.by.turn, pause_s)
            pauses_s = (*silent.pauses_s, pause_s)[-MOST_PAUSES:]
            self._cache.found_ahead(keys)
            self._end(silent)
        self._talking[name] = keys[-1], pauses_s

    def ended(self, name: str, holding: Holding, by: Asker) -> None:
        now_s = self._clock()
        self._ends_s.append(now_s)
        told = self._talking.pop(name, None)
        if told is None or not holding.keys:
            return
        called, pauses_s = told
        self._pauses.ended(by.turn)
        silent = _Silent(holding.keys[-1], by, now_s, pauses_s, self._pauses.window(by.turn, pauses_s))
        if called in self._silent:
            self._end(self._silent.pop(called))
        self._silent[called] = silent
        if len(self._silent) > REMEMBERED_CONVERSATIONS:
            self._end(self._silent.popitem(last=False)[1])
        if silent.window is not None:
            begin_s = now_s + silent.window.from_s - LEAD_S - 2 * self._fetch_s(len(holding.keys))
            heapq.heappush(self._due, (begin_s, next(self._numbers), silent))

    def fetched(self, key: Key) -> None:
        if self._bringing is not None:
            self._bringing.coming.discard(key)

    def act(self, now_s: float, *, room_is_short: bool) -> None:
        while self._guesses and (self._guesses[0][0] < now_s or self._guesses[0][2].over):
            self._end(heapq.heappop(self._guesses)[2])
        if room_is_short:
            self._let_go()
            return
        while self._bringing is None or not self._under_way(self._bringing):
            if self._bringing is None and not self._begin(now_s):
                return
            if self._bringing is not None and not self._bring_more(self._bringing, now_s):
                self._let_go()

    def _begin(self, now_s: float) -> bool:
        """With what is due, if anything is."""
        while self._due and self._due[0][0] <= now_s:
            silent = heapq.heappop(self._due)[2]
            window = silent.window
            if silent.over or window is None or silent.since_s + window.until_s < now_s:
                continue
            silent.keys = self._cache.chain(silent.last)
            if silent.keys:
                heapq.heappush(self._guesses, (silent.since_s + window.until_s, next(self._numbers), silent))
                self._bringing = _Bringing(silent)
                return True
        return False

    def _under_way(self, bringing: _Bringing) -> bool:
        return bool(bringing.coming) or (bringing.holding is not None and bringing.holding.moves > 0)

    def _bring_more(self, bringing: _Bringing, now_s: float) -> bool:
        """The next portion; False: there is none."""
        silent = bringing.silent
        if silent.over:
            return False
        may_go = self._less_likely_than(silent, now_s)
        if bringing.holding is None:
            coming = self._cache.fetch_ahead(silent.keys, silent.by, PORTION_BLOCKS, may_go)
            if coming:
                bringing.coming = set(coming)
                return True
            bringing.holding = Holding(by=silent.by)
        if bringing.holding.arrivals:  # one that was lost: it would be lost again
            return False
        return self._cache.load_ahead(bringing.holding, silent.keys, PORTION_BLOCKS, may_go)

    def _let_go(self) -> None:
        bringing, self._bringing = self._bringing, None
        if bringing is not None and bringing.holding is not None:
            self._cache.let_go(bringing.holding)

    def _less_likely_than(self, silent: _Silent, now_s: float) -> Callable[[Unused], bool]:
        """Whether what goes next to make room is."""
        window = silent.window
        assert window is not None

        def may_go(unused: Unused) -> bool:
            if unused.guessed:
                return False
            # Its own request is the one before the uses that followed. (Or it runs still, and is taken to have ended.)
            if unused.uses >= len(self._ends_s):  # longer ago than anything is remembered, or a guess that was wrong
                return True
            silent_s = now_s - self._ends_s[-1 - unused.uses]
            likelihood = self._pauses.likelihood(unused.turn, silent_s, window.seconds)
            return likelihood * TIMES_AS_LIKELY < window.likelihood

        return may_go

    def _end(self, silent: _Silent) -> None:
        """Nobody waits for it any more: what was brought up and not found goes first."""
        if not silent.over:
            silent.over = True
            self._cache.wrong(silent.keys)
            silent.keys = []
