"""What a scheduler sees and what it decides: the seam between policies and everything that runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.slo import Slo, Timeline

# Lower is served first: (tier rank, arrival, id). Total, so that "strictly lower priority" has one meaning.
Priority = tuple[int, float, str]


@dataclass(frozen=True, slots=True)
class Queued:
    """Holds no blocks. `tokens` must be computed before its next token: the prompt, and after a pre-emption also what
    was generated so far."""

    id: str
    priority: Priority
    tokens: int
    ttft_due_s: float


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Holds blocks for all its `tokens`, of which `computed` are in the KV cache."""

    id: str
    priority: Priority
    tokens: int
    computed: int
    ttft_due_s: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """`context` tokens are in the KV cache; the next step computes one more, in one of `blocks` blocks."""

    id: str
    priority: Priority
    context: int
    blocks: int
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of one sequence."""

    id: str
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """One launched piece of prefill: the spans' tokens through layers [first_layer, last_layer).

    All slices of one pass carry the same `job`, under which the executor keeps the activations between them.
    """

    job: int
    spans: tuple[Span, ...]
    first_layer: int
    last_layer: int

    @property
    def tokens(self) -> int:
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One decode step for these sequences."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `preempt` gives back its blocks before `admit` takes some; both before the launch.

    `fused`: decode and prefill go through the layers in one batch, on the whole device. Else each goes on its own
    lane of `partition`.
    """

    partition: Partition
    admit: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()
    decode: DecodeBatch | None = None
    prefill: PrefillSlice | None = None
    fused: bool = False

    @property
    def launches(self) -> bool:
        return self.decode is not None or self.prefill is not None


@dataclass(frozen=True, slots=True)
class PoolState:
    free_blocks: int
    block_tokens: int

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Flight:
    """What is running: the parts of the plans launched whose completion has not come, and the units each holds."""

    decode: DecodeBatch | None = None
    decode_units: int = 0
    prefill: PrefillSlice | None = None
    prefill_units: int = 0

    @property
    def idle(self) -> bool:
        return self.decode is None and self.prefill is None

    @property
    def ids(self) -> frozenset[str]:
        """Sequences whose KV is being written."""
        decode = self.decode.ids if self.decode else ()
        prefill = tuple(span.id for span in self.prefill.spans) if self.prefill else ()
        return frozenset((*decode, *prefill))


@dataclass(frozen=True, slots=True)
class Measured:
    """What running showed, by compute units: seconds of a decode step, and of one prefill token through one layer."""

    decode_step_s: dict[int, float] = field(default_factory=dict)
    prefill_token_layer_s: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Objective:
    """What the agent asks: targets, and bounds on decode's share of the device when it is split (0 to 1)."""

    slo: Slo
    min_decode_share: float = 0.0
    max_decode_share: float = 1.0


@dataclass(frozen=True, slots=True)
class State:
    """All that a scheduler may know. `queued`, `prefilling` and `decoding` are each in order of priority.

    Of the queue it may be only the head. `paused` is the prefill pass that stands between two slices: its next slice
    starts at `paused.last_layer`. A new pass takes the number `next_job`.
    """

    table: PartitionTable
    layers: int
    pool: PoolState
    objective: Objective
    flight: Flight = Flight()
    paused: PrefillSlice | None = None
    next_job: int = 1
    queued: tuple[Queued, ...] = ()
    prefilling: tuple[Prefilling, ...] = ()
    decoding: tuple[Decoding, ...] = ()
    measured: Measured = Measured()


class Scheduler(Protocol):
    """The same calls give the same plans, live and simulated."""

    def plan(self, state: State, now_s: float) -> Plan:
        """The next launches. Only idle lanes get work; an empty plan means: wait for a completion or a request."""
        ...

    def request_ended(self, timeline: Timeline, slo: Slo) -> None:
        """Feedback: how one finished request fared."""
        ...
