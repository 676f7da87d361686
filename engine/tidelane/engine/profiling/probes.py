"""The passes that a profile is made of: sizes from one token to thousands, on every row of the partition table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import NO_WORK, PassWork, decode_work, prefill_work
from tidelane.engine.lanes.partition import Partition, PartitionTable

# Powers of 2, where the fit has its knots, and what lies half way between, where it is furthest from them.
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (48, 160, 512, 1536, 4096)
NEW_TOKENS = (1, 4, 12, 24, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
REUSED_TOKENS = (1024, 256, 2048)
SEVERAL = (4, 2, 8)
# Fused passes: few sequences or many that decode, beside chunks of a prompt.
FUSED_BATCHES = ((1, 512), (4, 160), (16, 160), (48, 320))
FUSED_TOKENS = (8, 32, 96, 256, 640, 1536, 3072)
# Side by side: what decodes, and what is prefilled meanwhile (start, stop).
BESIDE_BATCHES = ((1, 256), (8, 512), (32, 160))
BESIDE_SPANS = ((0, 256), (1024, 1280))


class Kind(StrEnum):
    DECODE = Phase.DECODE.value
    PREFILL = Phase.PREFILL.value
    FUSED = Phase.FUSED.value
    BESIDE = "beside"  # decode and prefill on a lane each, at the same time


@dataclass(frozen=True, slots=True)
class Room:
    """The most tokens of one sequence, and the blocks of all."""

    context_tokens: int
    blocks: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Probe:
    """A launch to be timed, on `partition`: a step of sequences with `contexts` tokens in their KV caches, and a pass
    over `spans` (start, stop) of as many prompts."""

    partition: Partition
    contexts: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    fused: bool = False

    @property
    def kind(self) -> Kind:
        if self.contexts and self.spans:
            return Kind.FUSED if self.fused else Kind.BESIDE
        return Kind.DECODE if self.contexts else Kind.PREFILL

    @property
    def units(self) -> int:
        """Of the lane that it runs on; of decode's, if it runs on two."""
        return self.partition.decode_units if self.contexts else self.partition.prefill_units

    @property
    def decode(self) -> PassWork:
        return decode_work(len(self.contexts), sum(self.contexts))

    @property
    def prefill(self) -> PassWork:
        return prefill_work(self.spans)

    @property
    def work(self) -> PassWork:
        return (self.decode if self.contexts else NO_WORK) + self.prefill

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens in the KV cache at its end, sequence by sequence: first those that decode."""
        return (*(context + 1 for context in self.contexts), *(stop for _, stop in self.spans))

    def blocks(self, block_tokens: int) -> int:
        return sum(-(-tokens // block_tokens) for tokens in self.held)

    def fits(self, room: Room) -> bool:
        return max(self.held) <= room.context_tokens and self.blocks(room.block_tokens) <= room.blocks


def probes(table: PartitionTable, room: Room) -> list[Probe]:
    """All that fit `room`."""
    rows = (*table.splits, table.whole)
    found = [Probe(row, contexts=contexts) for row in rows for contexts in _batches()]
    found += [Probe(row, spans=spans) for row in rows for spans in _prefills()]
    found += [Probe(table.whole, contexts, spans, fused=True) for contexts, spans in _fused()]
    found += [
        Probe(row, uneven(batch, context), (span,))
        for row in table.splits
        for batch, context in BESIDE_BATCHES
        for span in BESIDE_SPANS
    ]
    return [probe for probe in found if probe.fits(room)]


def uneven(batch: int, context: int) -> tuple[int, ...]:
    """Contexts of a batch, from half of `context` to one and a half, as requests that came one after another have."""
    if batch == 1:
        return (context,)
    return tuple(context // 2 + context * at // (batch - 1) for at in range(batch))


def _batches() -> Iterator[tuple[int, ...]]:
    return (uneven(batch, context) for batch in BATCHES for context in CONTEXTS)


def _prefills() -> Iterator[tuple[tuple[int, int], ...]]:
    """Each number of new tokens as one new prompt, and in turn as the rest of one, as several, as the rest of several:
    what costs of tokens, pairs and sequences are told apart by."""
    for i, new in enumerate(NEW_TOKENS):
        yield ((0, new),)
        start, count = REUSED_TOKENS[i % len(REUSED_TOKENS)], SEVERAL[i % len(SEVERAL)]
        each = new // count
        if i % 3 == 0 or each == 0:
            yield ((start, start + new),)
        elif i % 3 == 1:
            yield ((0, each),) * count
        else:
            yield ((start, start + each),) * count


def _fused() -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Every third prompt is not at its beginning."""
    for i, (batch, context) in enumerate(FUSED_BATCHES):
        for j, new in enumerate(FUSED_TOKENS):
            start = REUSED_TOKENS[j % len(REUSED_TOKENS)] if (i + j) % 3 == 0 else 0
            yield uneven(batch, context), ((start, start + new),)
