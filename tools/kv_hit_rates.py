"""How many prompt tokens of a trace a KV cache of some size finds, by what it keeps.

    python -m tools.kv_hit_rates ../shared/traces/mooncake/conversation_trace.jsonl --json kv-hit-rates.json

The trace must name blocks, as Mooncake's do. Prompts come one after the other, each whole before the next, into a cache
that is empty at first: the engine's own books, with one retention policy or another, and other policies block by block
(tools/kv_policies.py). A prompt's whole blocks are kept, but for one that holds its last token, which is always
computed. What was answered has no name in the trace until it is part of a later prompt.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Protocol

from tools.kv_policies import Arc, Cache, Frequency, S3Fifo, found, optimum
from tools.live.rig import one_or_more, refusing, write_measurement

from tidelane.cli.targets import BadOption
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.traces import TraceFormat, read_trace
from tidelane.engine.bench.traffic import HASHED_TOKENS, Arrival
from tidelane.engine.kv.cache import REMEMBERED_PROMPTS
from tidelane.engine.kv.device_blocks import DeviceBlocks
from tidelane.engine.kv.keys import KEY_BYTES, Key
from tidelane.engine.kv.retention import MOST_TURNS, Asker, LeastRecentlyUsed, LongerByTurn, Retention
from tidelane.engine.kv.slot_blocks import SlotBlocks
from tidelane.engine.kv.turns import Turns
from tidelane.engine.request import ServiceTier

LRU, OURS = "least recently used", "longer by turn"
BLOCKS = (1_000, 5_000, 10_000, 50_000)
# Tokens of context at which attention costs a token as much as all weights do: Llama-3.1-8B, 32 layers of 4,096.
EQUAL_COST_TOKENS = 30_000


@dataclass(frozen=True, slots=True)
class Prompts:
    """`blocks`: of each prompt, by name, those that can be found. `tokens`: of all prompts together."""

    blocks: tuple[tuple[int, ...], ...]
    tokens: int

    @staticmethod
    def of(arrivals: Sequence[Arrival]) -> Prompts:
        whole = tuple(each.hash_ids[: (each.input_tokens - 1) // HASHED_TOKENS] for each in arrivals)
        return Prompts(whole, sum(each.input_tokens for each in arrivals))

    @property
    def most(self) -> int:
        """How many of any prompt."""
        return max(map(len, self.blocks))


class Tier(Protocol):
    """One tier's books."""

    def prompt(self, keys: Sequence[Key], by: Asker) -> int:
        """It comes, is computed and ends. How many blocks of it were found."""
        ...


class Slots:
    """Host memory or disk."""

    def __init__(self, blocks: int, retention: Retention) -> None:
        self._blocks = SlotBlocks(blocks, _unheard, _unheard, retention)

    def prompt(self, keys: Sequence[Key], by: Asker) -> int:
        there = sum(1 for _ in takewhile(self._blocks.__contains__, keys))
        self._blocks.read(keys[:there])
        for before, key in zip((b"", *keys)[there:], keys[there:], strict=False):
            if self._blocks.reserve(before, key, by) is None:
                break
            self._blocks.written(key, well=True)
        self._blocks.was_read(keys[:there])
        self._blocks.used(keys, by)
        return there


class Device:
    def __init__(self, blocks: int, retention: Retention) -> None:
        self._blocks = DeviceBlocks(blocks, _unheard, _unheard, retention)

    def prompt(self, keys: Sequence[Key], by: Asker) -> int:
        there = sum(1 for _ in takewhile(self._blocks.__contains__, keys))
        held = self._blocks.take(keys[:there], by)
        held += self._blocks.allocate(len(keys) - there)
        for at in range(there, len(keys)):
            self._blocks.publish(keys[at], held[at], held[at - 1] if at else None, by)
        self._blocks.release(held)
        return there


def _unheard(_: Key) -> None:
    """Nobody waits."""


def keys_of(blocks: Sequence[int]) -> list[Key]:
    return [block.to_bytes(KEY_BYTES, "big") for block in blocks]


def through(tier: Tier, prompts: Prompts, remembered: int) -> int:
    """How many blocks of these the books of a tier find, where so many prompts are remembered for their turns."""
    turns, total = Turns(remembered), 0
    for blocks in prompts.blocks:
        keys = keys_of(blocks)
        total += tier.prompt(keys, Asker(turns.next(keys), ServiceTier.DEFAULT.rank))
    return total


def one_by_one(cache: Cache, prompts: Prompts) -> int:
    return sum(found(cache, blocks) for blocks in prompts.blocks)


def recompute_cost(prompts: Prompts) -> dict[int, float]:
    """Of each block, in those of the first: attention grows with what stands before it."""
    return {
        block: 1.0 + depth * HASHED_TOKENS / EQUAL_COST_TOKENS
        for blocks in prompts.blocks
        for depth, block in enumerate(blocks)
    }


def measures(prompts: Prompts) -> Mapping[str, Callable[[int], int]]:
    """By name: how many blocks are found with room for so many."""
    cost = recompute_cost(prompts)

    def slots(retention: Callable[[], Retention], remembered: int = REMEMBERED_PROMPTS) -> Callable[[int], int]:
        return lambda room: through(Slots(room, retention()), prompts, remembered)

    def device(retention: Callable[[], Retention]) -> Callable[[int], int]:
        return lambda room: through(Device(room, retention()), prompts, REMEMBERED_PROMPTS)

    return {
        LRU: slots(LeastRecentlyUsed),
        OURS: slots(LongerByTurn),
        "least recently used, device": device(LeastRecentlyUsed),
        "longer by turn, device": device(LongerByTurn),
        "- weight 1.25 a turn": slots(lambda: LongerByTurn(weight=1.25)),
        "- weight 2 a turn": slots(lambda: LongerByTurn(weight=2.0)),
        "- at most 4 turns": slots(lambda: LongerByTurn(most_turns=4)),
        "- 1,000 prompts remembered": slots(LongerByTurn, 1_000),
        "- 100 prompts remembered": slots(LongerByTurn, 100),
        "S3-FIFO": lambda room: one_by_one(S3Fifo(room), prompts),
        "ARC": lambda room: one_by_one(Arc(room), prompts),
        "LFU with ageing": lambda room: one_by_one(Frequency(room), prompts),
        "GDSF by cost of computing": lambda room: one_by_one(Frequency(room, cost), prompts),
        "optimum": lambda room: optimum(prompts.blocks, room),
    }


@dataclass(frozen=True, slots=True)
class GoingOn:
    """Of prompts of one turn, in the first three quarters of the trace: the share that a later prompt begins with, and
    the median time until the first such."""

    prompts: int
    share: float
    after_s: float


def going_on(arrivals: Sequence[Arrival]) -> dict[int, GoingOn]:
    """By turn, as far as `LongerByTurn` tells them apart. Prompts of less than two whole blocks are left out: what all
    prompts of the trace begin with is one."""
    ends: dict[int, tuple[int, float]] = {}  # of prompts that no other has gone on from: turn, and when
    after_s: defaultdict[int, list[float | None]] = defaultdict(list)
    turns = Turns(REMEMBERED_PROMPTS)
    considered_s = 0.75 * arrivals[-1].at_s
    for arrival, blocks in zip(arrivals, Prompts.of(arrivals).blocks, strict=True):
        for block in blocks:
            turn, at_s = ends.pop(block, (0, 0.0))
            if turn and at_s < considered_s:
                after_s[turn].append(arrival.at_s - at_s)
        turn = turns.next(keys_of(blocks))
        if len(blocks) > 1:
            ends[blocks[-1]] = min(turn, MOST_TURNS), arrival.at_s
    for turn, at_s in ends.values():
        if at_s < considered_s:
            after_s[turn].append(None)
    found = {}
    for turn, all_s in sorted(after_s.items()):
        went_s = [each for each in all_s if each is not None]
        found[turn] = GoingOn(len(all_s), len(went_s) / len(all_s), median(went_s) if went_s else math.inf)
    return found


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares of prompt tokens found, by policy and blocks of room."""

    prompts: int
    tokens: int
    without_limit: float
    hit_rates: dict[str, dict[int, float]]


def measured(prompts: Prompts, rooms: Sequence[int], only: Sequence[str] = ()) -> Figures:
    """All policies, or `only` these. Raises BadOption if a prompt has more blocks than the least room."""
    if prompts.most > min(rooms):
        raise BadOption(f"--blocks: a prompt of the trace has {prompts.most}")
    by_name = measures(prompts)
    share = HASHED_TOKENS / prompts.tokens
    return Figures(
        len(prompts.blocks),
        prompts.tokens,
        optimum(prompts.blocks, sum(map(len, prompts.blocks))) * share,
        {name: {room: by_name[name](room) * share for room in rooms} for name in only or by_name},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="of Mooncake's form (.jsonl)")
    parser.add_argument("--blocks", type=one_or_more, nargs="+", default=BLOCKS, help="room, in blocks of 512 tokens")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    check_outputs(args.json, None, args.trace)
    traffic = read_trace(args.trace, TraceFormat.MOONCAKE)
    parts = {"whole": traffic.arrivals, **_halves(traffic.arrivals)}
    figures = {
        part: measured(Prompts.of(arrivals), args.blocks, () if part == "whole" else (LRU, OURS))
        for part, arrivals in parts.items()
    }
    by_turn = going_on(traffic.arrivals)
    print("\n".join(line for part, each in figures.items() for line in table(part, each)))
    print("\n".join(turns_table(by_turn)))
    if args.json is not None:
        about = {"trace": args.trace.name, "block_tokens": HASHED_TOKENS}
        turns = {"by_turn": {turn: asdict(each) for turn, each in by_turn.items()}}
        write_measurement(args.json, {**about, **{part: asdict(each) for part, each in figures.items()}, **turns})
    return 0


def _halves(arrivals: Sequence[Arrival]) -> dict[str, Sequence[Arrival]]:
    half = len(arrivals) // 2
    return {"first half": arrivals[:half], "second half": arrivals[half:]}


def table(part: str, figures: Figures) -> Iterator[str]:
    """In Markdown."""
    rooms = list(next(iter(figures.hit_rates.values())))
    yield f"\n{part}: {figures.prompts:,} prompts, {figures.tokens:,} tokens\n"
    yield f"| tokens found, % | {' | '.join(f'{room:,} blocks' for room in rooms)} | no limit |"
    yield f"|---|{'---|' * len(rooms)}---|"
    for name, by_room in figures.hit_rates.items():
        cells = " | ".join(f"{100 * rate:.2f}" for rate in by_room.values())
        yield f"| {name} | {cells} | {100 * figures.without_limit:.2f} |"


def turns_table(by_turn: Mapping[int, GoingOn]) -> Iterator[str]:
    yield f"\n| turn | {' | '.join(map(str, by_turn))} and later |"
    yield f"|---|{'---|' * len(by_turn)}"
    yield f"| prompts | {' | '.join(f'{each.prompts:,}' for each in by_turn.values())} |"
    yield f"| go on, % | {' | '.join(f'{100 * each.share:.0f}' for each in by_turn.values())} |"
    yield f"| after (median), s | {' | '.join(f'{each.after_s:.0f}' for each in by_turn.values())} |"


if __name__ == "__main__":
    sys.exit(refusing(main))
