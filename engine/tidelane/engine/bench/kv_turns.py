"""How soon a conversation's next turn is answered, by where the KV of all before it is found.

An engine with a pool that holds one prompt, host memory that holds two, and a disk that holds five. The same tokens
under another salt are computed, and push out what was there: one such prompt off the device, two off host memory, too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tidelane.engine.bench.in_process import LOOSE_SLO, InProcessEngine
from tidelane.engine.bench.kv_report import Sizes
from tidelane.engine.bench.ratio import Measured, Ratio
from tidelane.engine.channel import Tokens
from tidelane.engine.config import ServeConfig
from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.moves import Load, Move, Mover
from tidelane.engine.kv.slot_file import SlotLayout
from tidelane.engine.model.loading import LoadedModel, kv_namespace
from tidelane.engine.request import Request, Sampling
from tidelane.engine.tiers import Below, open_below
from tidelane.rpc.wire import ExecutionMode, Objective

HOST_AT_LEAST = 5.0
DISK_AT_LEAST = 3.0
_HOST_PROMPTS = 2
_DISK_PROMPTS = 5


class Place(StrEnum):
    DEVICE = "on the device"
    HOST = "in host memory"
    DISK = "on the disk"
    NOWHERE = "nowhere"


class OtherCase(RuntimeError):
    """A turn was answered in another way than the one that was to be measured: its figures would tell a lie."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an answer was made from: tokens that were not computed, blocks loaded from host memory for it, and blocks
    fetched from the disk before that."""

    cached_tokens: int
    loaded_blocks: int
    fetched_blocks: int

    @staticmethod
    def whole(place: Place, blocks: int, block_tokens: int) -> Found:
        """All `blocks` of the history, in this place alone."""
        if place is Place.NOWHERE:
            return Found(0, 0, 0)
        below = 0 if place is Place.DEVICE else blocks
        return Found(blocks * block_tokens, below, blocks if place is Place.DISK else 0)

    def check(self, place: Place, wanted: Found) -> None:
        if self != wanted:
            raise OtherCase(f"KV was to be found {place}, as {wanted}, but it was {self}: nothing can be said of it")


@dataclass(frozen=True, slots=True)
class Turns:
    """TTFT samples in seconds, by place; and the pairs (host slots, device blocks) of a load, as the books had them."""

    ttft_s: dict[Place, tuple[float, ...]]
    slots: tuple[int, ...]
    blocks: tuple[int, ...]

    def ratios(self) -> tuple[Ratio, ...]:
        recompute = Measured("computed", self.ttft_s[Place.NOWHERE], "s")
        wanted = {Place.DEVICE: None, Place.HOST: HOST_AT_LEAST, Place.DISK: DISK_AT_LEAST}
        return tuple(
            Ratio(f"TTFT, {place}", recompute, Measured("found", self.ttft_s[place], "s"), least)
            for place, least in wanted.items()
        )


def prompt_blocks(sizes: Sizes, layout: KVLayout) -> int:
    """That a next turn takes, with its answer of one token."""
    return layout.blocks_for(sizes.turn_tokens + 1)


def host_slots(sizes: Sizes, layout: KVLayout) -> int:
    """No more than what two prompts leave: with both, nothing of a third is there."""
    return _HOST_PROMPTS * (sizes.turn_tokens // layout.block_tokens)


def disk_slots(sizes: Sizes, layout: KVLayout) -> int:
    return _DISK_PROMPTS * prompt_blocks(sizes, layout)


def turns(loaded: LoadedModel, cores: Sequence[int], sizes: Sizes, folder: Path, tell: Callable[[str], None]) -> Turns:
    """Raises OtherCase, and CannotServe where there is no room for it."""
    layout = loaded.facts.kv_layout
    heard = _LastLoad()

    def tiers(pool: DevicePool, notify: Callable[[], None]) -> Below:
        below = open_below(_config(loaded, sizes, folder), loaded.facts, pool, notify)
        if not below.disk_slots:
            below.mover.close()
            raise CannotServe(f"no KV can be kept in {folder}; name another folder")
        heard.mover = below.mover
        # Without the size of a record no fetch is predicted to take time: a slow disk is to be measured, not avoided.
        return replace(below, mover=heard, record_bytes=0)

    with InProcessEngine(
        loaded,
        cores=cores,
        kv_blocks=prompt_blocks(sizes, layout),
        names=TokenNames(kv_namespace(loaded.facts), layout.block_tokens),
        open_tiers=tiers,
    ) as engine:
        asked = _Conversation(engine, sizes, loaded.facts.vocab_size)
        asked.begin()
        ttft_s: dict[Place, list[float]] = {place: [] for place in Place}
        slots: tuple[int, ...] = ()
        blocks: tuple[int, ...] = ()
        for number in range(sizes.rounds):
            tell(f"Turns of a conversation, round {number + 1} of {sizes.rounds}")
            for place in (Place.DEVICE, Place.NOWHERE, Place.HOST, Place.NOWHERE, Place.NOWHERE, Place.DISK):
                ttft_s[place].append(asked.again(place))
                if place is Place.HOST:
                    assert heard.last is not None
                    slots, blocks = heard.last.slots, heard.last.blocks
    return Turns({place: tuple(samples) for place, samples in ttft_s.items()}, slots, blocks)


def _config(loaded: LoadedModel, sizes: Sizes, folder: Path) -> ServeConfig:
    layout = loaded.facts.kv_layout
    return ServeConfig(
        model=str(loaded.facts.folder),
        model_store=folder,
        served_name="kv-bench",
        objective=Objective(LOOSE_SLO, ExecutionMode.LANES),
        kv_host_bytes=host_slots(sizes, layout) * layout.block_bytes,
        kv_disk_bytes=SlotLayout(layout.block_bytes, disk_slots(sizes, layout)).file_bytes,
        kv_disk_folder=folder,
    )


class _Conversation:
    """One history, and as many next turns as are asked for, each with other new tokens."""

    def __init__(self, engine: InProcessEngine, sizes: Sizes, vocab_size: int) -> None:
        self._engine = engine
        self._sizes = sizes
        self._chance = random.Random(0)
        self._vocab_size = vocab_size
        self._history = self._tokens(sizes.history_tokens)
        self._asked = 0

    def begin(self) -> None:
        """The turn before. What the model answers to it is one token, the first of the new ones of each next turn."""
        self._ask(self._history, "")

    def again(self, place: Place) -> float:
        """TTFT of a next turn, in seconds. Raises OtherCase unless all of its history was found there."""
        salt = f"nobody else's {self._asked}" if place is Place.NOWHERE else ""
        ttft_s, found = self._ask(self._history + self._tokens(self._sizes.new_tokens), salt)
        block_tokens = self._engine.pool.layout.block_tokens
        found.check(place, Found.whole(place, len(self._history) // block_tokens, block_tokens))
        return ttft_s

    def _ask(self, prompt: tuple[int, ...], salt: str) -> tuple[float, Found]:
        """Until all that it caused to be moved has been."""
        engine, cache = self._engine, self._engine.ledger.pool
        self._asked += 1
        name = f"turn {self._asked}"
        loaded, fetched = cache.loaded_blocks, cache.fetched_blocks
        arrival_s = time.monotonic()
        engine.submit(Request(name, prompt, 1, Sampling(seed=0, temperature=0.0), arrival_s, cache_salt=salt))
        engine.run()
        ending = engine.endings()[name]
        if not isinstance(ending, Tokens) or ending.error is not None:
            raise OtherCase(f"a turn was not answered: {ending}")
        found = Found(ending.cached_tokens, cache.loaded_blocks - loaded, cache.fetched_blocks - fetched)
        return ending.time_s - arrival_s, found

    def _tokens(self, count: int) -> tuple[int, ...]:
        # Any that the model has will do: how long a pass takes does not depend on which.
        return tuple(self._chance.randrange(self._vocab_size) for _ in range(count))


class _LastLoad:
    """Passes all moves on, and keeps the last load. `mover` is this one's to close."""

    def __init__(self) -> None:
        self.mover: Mover
        self.last: Load | None = None

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if isinstance(move, Load):
                self.last = move
        self.mover.start(moves)

    def poll(self) -> Sequence[tuple[Move, bool]]:
        return self.mover.poll()

    def close(self) -> None:
        self.mover.close()
