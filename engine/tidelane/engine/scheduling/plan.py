"""What a scheduler sees and what it decides: the seam between policies and everything that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from tidelane.engine.estimation.estimates import Estimates
from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.slo import Slo

# Lower is served first: (tier rank, arrival, id). Total, so that "strictly lower priority" has one meaning.
Priority = tuple[int, float, str]


class Queued(msgspec.Struct, frozen=True):
    """Holds no blocks. `tokens` must be computed before its next token: the prompt, and after a pre-emption also what
    was generated so far. The first `cached` of them need no computing: their blocks are there, and `shared_blocks` of
    these are held by others, so that it needs no room for them. `work_s` is its prefill on the whole device.
    """

    id: str
    priority: Priority
    tokens: int
    ttft_due_s: float
    work_s: float = 0.0
    cached: int = 0
    shared_blocks: int = 0

    @property
    def computed(self) -> int:
        return self.cached


class Prefilling(msgspec.Struct, frozen=True):
    """Holds blocks for all its `tokens`, of which `computed` are in the KV cache; `work_s` is for the others."""

    id: str
    priority: Priority
    tokens: int
    computed: int
    ttft_due_s: float
    work_s: float = 0.0


Waiting = Queued | Prefilling


class Decoding(NamedTuple):
    """`context` tokens are in the KV cache; the next step computes one more, in one of `blocks` blocks.

    `next_due_s` is when the next token must be there for the mean gap so far to keep to `tpot_s`.
    """

    id: str
    priority: Priority
    context: int
    blocks: int
    tpot_s: float
    next_due_s: float


class Streaming(msgspec.Struct, frozen=True):
    """The sequence whose context is larger than the device's pool (docs/adr/0035): it has its room, and computes in
    passes of its own, of its next token, too. Of its `tokens`, `computed` are in the cache.

    A pass takes `most_tokens` at the most. `paused` is its pass, if that stands between two slices. `had_last`: nothing
    of others has ended since its last slice, which took `slice_s` and ended at `idle_since_s`. To read its older KV
    takes `read_s`; its passes take `pace` times what is predicted of them.
    """

    id: str
    tokens: int
    computed: int
    most_tokens: int
    paused: PrefillSlice | None
    had_last: bool
    idle_since_s: float
    slice_s: float
    read_s: float
    pace: float


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of one sequence."""

    id: str
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class PrefillSlice(msgspec.Struct, frozen=True):
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


class DecodeBatch(msgspec.Struct, frozen=True):
    """One decode step for these sequences."""

    ids: tuple[str, ...]


class Decision(msgspec.Struct, frozen=True):
    """Why a plan is what it is, in numbers: for `/debug/decisions` and reports, read by no one who decides.

    `budget_s` is what the decode step may take; `step_s` and `slice_s` are what was predicted, guard and contention
    included. `lanes_tokens_s` and `fused_tokens_s` are the prefill rates compared, where both were.
    """

    reason: str
    running: int
    waiting: int
    budget_s: float | None = None
    step_s: float | None = None
    slice_s: float | None = None
    lanes_tokens_s: float | None = None
    fused_tokens_s: float | None = None


class Late(msgspec.Struct, frozen=True):
    """A request to refuse: its `tokens` would be answered `ttft_s` after it came, for a target of `target_s`. One like
    it that comes after `retry_after_s`, in whole seconds, should be on time.
    """

    id: str
    tokens: int
    ttft_s: float
    target_s: float
    retry_after_s: float


class Plan(msgspec.Struct, frozen=True):
    """What to do now. `preempt` gives back its blocks before `admit` takes some; both before the launch. `refuse` names
    newcomers only.

    `fused`: decode and prefill go through the layers in one batch, on the whole device. Else each goes on its own
    lane of `partition`.
    """

    partition: Partition
    admit: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()
    decode: DecodeBatch | None = None
    prefill: PrefillSlice | None = None
    fused: bool = False
    refuse: tuple[Late, ...] = ()
    why: Decision | None = None

    @property
    def launches(self) -> bool:
        return self.decode is not None or self.prefill is not None


class PoolState(msgspec.Struct, frozen=True):
    """`shared` says how many of the blocks of a running sequence others hold as well, so that they do not get free with
    it; told where blocks are short, and of those that share any."""

    free_blocks: int
    block_tokens: int
    shared: Mapping[str, int] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


class Flight(msgspec.Struct, frozen=True):
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
class Objective:
    """What the agent asks: targets, and bounds on decode's share of the device when it is split (0 to 1).

    `refuse_late`: whoever would miss its TTFT target is refused as it comes, not served late.
    """

    slo: Slo
    min_decode_share: float = 0.0
    max_decode_share: float = 1.0
    refuse_late: bool = False


class State(msgspec.Struct, frozen=True):
    """All that a scheduler may know. `queued`, `prefilling` and `decoding` are each in order of priority.

    `queued_by_due` are the queued by tier and TTFT deadline. `paused` is the prefill pass that stands between two
    slices: its next slice starts at `paused.last_layer`. A new pass takes the number `next_job`. Without
    `can_prefill` nothing but decode can be launched: the process that prefills is being started again. `newcomers` are
    those of the queued that came since the last plan. `stream` is in none of these.
    """

    table: PartitionTable
    layers: int
    pool: PoolState
    objective: Objective
    estimates: Estimates
    flight: Flight = Flight()
    paused: PrefillSlice | None = None
    next_job: int = 1
    can_prefill: bool = True
    queued: tuple[Queued, ...] = ()
    queued_by_due: tuple[Queued, ...] = ()
    newcomers: tuple[Queued, ...] = ()
    prefilling: tuple[Prefilling, ...] = ()
    decoding: tuple[Decoding, ...] = ()
    stream: Streaming | None = None


class Scheduler(Protocol):
    """Pure: the same state and time give the same plan, live and simulated."""

    def plan(self, state: State, now_s: float) -> Plan:
        """The next launches. Only idle lanes get work; an empty plan means: wait for a completion or a request."""
        ...
