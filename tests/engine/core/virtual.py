"""The real ledger and schedulers over an executor in virtual time: no torch, no threads, no waiting."""

from __future__ import annotations

import heapq
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tidelane.engine.channel import Abort, ForLoop, RefusalReason, Refused, Submit, ToFront, Tokens
from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.execution.executor import Completion, Event, PrefillBack, PrefillLost, Sampled
from tidelane.engine.execution.watched import WatchedExecutor, WatchedMover
from tidelane.engine.kv.canary import Canary
from tidelane.engine.kv.moves import Fetch, Load, Move, NoMover
from tidelane.engine.kv.retention import IDLE_TIMEOUT_S, ByServiceTier
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.lanes.partition import Partition, PartitionTable, partition_table
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.prefetch import NoLookAhead, Prefetcher
from tidelane.engine.request import FinishReason, NewToken, Request, Sampling, ServiceTier
from tidelane.engine.scheduling.plan import DecodeBatch, Flight, Objective, Plan, PrefillSlice, Scheduler
from tidelane.engine.scheduling.policies import policy as make_policy
from tidelane.engine.sequence import Sequence
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.usage import Usage
from tidelane.engine.waiting import BlockNames

SLO = Slo(ttft_s=1.0, tpot_s=0.1)

# What the virtual executor's passes take on one unit: a decode step at all, each sequence in it, and a token's layer.
STEP_S = 0.02
SEQUENCE_S = 0.001
TOKEN_LAYER_S = 0.0001


def true_estimates(units: int, layers: int) -> Estimates:
    """Predictions that the virtual executor keeps to exactly."""
    sizes = range(1, units + 1)
    token_s = TOKEN_LAYER_S * layers
    decode = {n: PassTimes((1,), (STEP_S / n**0.5,), sequence_s=SEQUENCE_S / n**0.5) for n in sizes}
    prefill = {n: PassTimes((0, 1024), (0.0, 1024 * token_s / n)) for n in sizes}
    fused = PassTimes(
        (0, 1024),
        (STEP_S / units**0.5, STEP_S / units**0.5 + 1024 * token_s / units),
    )
    return Estimates(
        {Phase.DECODE: decode, Phase.PREFILL: prefill, Phase.FUSED: {units: fused}}, Contention(1.0, 1.0, 1.0)
    )


def _policies() -> dict[str, Scheduler]:
    """One of each that a single device may run, by the name of its mode."""
    return {
        "Lanes": make_policy("lanes"),
        "Auto": make_policy("auto"),
        "ChunkedPrefill": make_policy("chunked", chunk_tokens=16),
        "ChunkedByBudget": make_policy("chunked"),
        "MixedBatch": make_policy("mixed", "own"),
        "StaticLanes": make_policy("static", split=Partition(1, 3)),
    }


@dataclass
class VirtualExecutor:
    """Costs a fixed time per step, token and layer, divided by the units; tokens are made up from positions.

    Checks what every executor may rely on: a lane is given work only while the units it needs are free, and no sequence
    is in two launches at once.
    """

    clock: VirtualClock
    units: int
    layers: int
    sequences: Mapping[str, Sequence]
    fail: Callable[[PrefillSlice | None], bool] = lambda _: False
    launched: list[tuple[float, Plan]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # whose output is no number any more
    stall_s: float = 0.0  # what prefill takes longer than it should
    _running: list[tuple[float, int, Completion]] = field(default_factory=list)
    _count: int = 0
    _untold: list[Event] = field(default_factory=list)

    def launch(self, plan: Plan) -> None:
        self.launched.append((self.clock.now_s, plan))
        if plan.fused:
            self._start(plan.decode, plan.prefill, plan.partition.decode_units)
            return
        if plan.decode is not None:
            self._start(plan.decode, None, plan.partition.decode_units)
        if plan.prefill is not None:
            self._start(None, plan.prefill, plan.partition.prefill_units)

    def end_prefill(self) -> None:
        """As if the process that prefills had ended."""
        lost = [entry for entry in self._running if entry[2].prefill is not None]
        self._running = [entry for entry in self._running if entry not in lost]
        heapq.heapify(self._running)
        self._untold.append(PrefillLost(lost[0][2].prefill if lost else None))

    def bring_prefill_back(self) -> None:
        self._untold.append(PrefillBack())

    def poll(self) -> list[Event]:
        ended, self._untold = self._untold, []
        while self._running and self._running[0][0] <= self.clock.now_s:
            ended.append(heapq.heappop(self._running)[2])
        return ended

    def forget(self, job: int) -> None:
        self.forgotten.append(job)

    def close(self) -> None:
        self._running.clear()

    @property
    def next_end_s(self) -> float | None:
        return self._running[0][0] if self._running else None

    def _start(self, decode: DecodeBatch | None, prefill: PrefillSlice | None, units: int) -> None:
        used = sum(completion.units for _, _, completion in self._running)
        assert used + units <= self.units, f"{units} units asked for, {used} of {self.units} are at work"
        ids = Flight(decode, prefill=prefill).ids
        for _, _, other in self._running:
            twice = ids & Flight(other.decode, prefill=other.prefill).ids
            assert not twice, f"{sorted(twice)} are at work already"
        seconds = 0.0
        if decode is not None:
            seconds += (STEP_S + SEQUENCE_S * len(decode.ids)) / units**0.5
        if prefill is not None:
            seconds += (
                self.stall_s + TOKEN_LAYER_S * prefill.tokens * (prefill.last_layer - prefill.first_layer) / units
            )
        failure = "made to fail" if self.fail(prefill) else None
        sampled = () if failure else self._sampled(decode, prefill)
        now_s = self.clock.now_s
        self._count += 1
        completion = Completion(decode, prefill, units, now_s, now_s + seconds, sampled, failure)
        heapq.heappush(self._running, (now_s + seconds, self._count, completion))

    def _sampled(self, decode: DecodeBatch | None, prefill: PrefillSlice | None) -> tuple[Sampled, ...]:
        samples = [self._token(i) for i in decode.ids] if decode is not None else []
        if prefill is not None and prefill.last_layer == self.layers:
            for span in prefill.spans:
                whole = span.stop == len(self.sequences[span.id].tokens)
                samples.append(self._token(span.id) if whole else Sampled(span.id, None))
        return tuple(samples)

    def _token(self, sequence_id: str) -> Sampled:
        if sequence_id in self.broken:
            return Sampled(sequence_id, None, failed=True)
        # A function of the position alone: what a pre-empted and recomputed sequence gets must not change.
        return Sampled(sequence_id, NewToken(1000 + len(self.sequences[sequence_id].tokens)))


class LateMover:
    """What is loaded is there at once; what moves otherwise, three looks later. Every fifth fetch finds nothing."""

    def __init__(self) -> None:
        self._under_way: list[tuple[int, Move]] = []
        self.hangs = False  # nothing ends
        self.loses = False  # what is loaded from now on
        self._looks = 0
        self._fetches = 0

    def start(self, moves: abc.Sequence[Move]) -> None:
        for move in moves:
            if isinstance(move, Load):
                move.arrival.reached(1000)
                if self.loses:
                    move.arrival.fail()
            self._under_way.append((self._looks + (0 if isinstance(move, Load) else 3), move))

    def poll(self) -> list[tuple[Move, bool]]:
        if self.hangs:
            return []
        self._looks += 1
        ended = [(move, not self._is_miss(move)) for due, move in self._under_way if due < self._looks]
        self._under_way = [entry for entry in self._under_way if entry[0] >= self._looks]
        return ended

    def _is_miss(self, move: Move) -> bool:
        if isinstance(move, Load):
            return move.arrival.lost
        if not isinstance(move, Fetch):
            return False
        self._fetches += 1
        return self._fetches % 5 == 0

    def close(self) -> None:
        """There are no threads."""


class MemoryDesk:
    """Messages in lists instead of sockets."""

    def __init__(self, policy: str) -> None:
        self.inbox: list[ForLoop] = []
        self.sent: list[ToFront] = []
        self.policy_name = policy

    def wait(self) -> None:
        return

    def messages(self) -> list[ForLoop]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[ToFront]) -> None:
        self.sent += messages

    def policy(self) -> str:
        return self.policy_name


class World:
    """One engine in virtual time."""

    def __init__(
        self,
        *,
        policy: str = "Lanes",
        units: int = 4,
        layers: int = 6,
        blocks: int = 64,
        block_tokens: int = 4,
        queue_limit: int = 1000,
        objective: Objective | None = None,
        policies: dict[str, Scheduler] | None = None,
        table: PartitionTable | None = None,
        fail: Callable[[PrefillSlice | None], bool] = lambda _: False,
        names: BlockNames | None = None,
        host_slots: int = 0,
        disk_slots: int = 0,
        fetch_s: Callable[[int], float] = lambda _: 0.0,
        prefetch: bool = False,
        stream_run: StreamRun | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.ended: list[tuple[Timeline | None, Slo]] = []
        self.desk = MemoryDesk(policy)
        self.policies = policies or _policies()
        self.ledger = Ledger(
            table=table or partition_table(units),
            layers=layers,
            block_tokens=block_tokens,
            blocks=blocks,
            queue_limit=queue_limit,
            objective=objective or Objective(SLO),
            estimates=true_estimates(units, layers),
            ended=lambda timeline, slo: self.ended.append((timeline, slo)),
            retention=lambda: ByServiceTier(IDLE_TIMEOUT_S, self.clock),
            names=names,
            host_slots=host_slots,
            disk_slots=disk_slots,
            fetch_s=fetch_s,
            look_ahead=partial(Prefetcher, fetch_s=fetch_s, clock=self.clock) if prefetch else NoLookAhead,
            stream_run=stream_run,
        )
        self.executor = VirtualExecutor(self.clock, units, layers, self.ledger.sequences, fail)
        self.mover = LateMover()
        canary = Canary(blocks, block_tokens, prints=np.zeros_like)  # there are no bytes
        self.usage = Usage(units, 0.0)
        self.loop = Loop(
            ledger=self.ledger,
            policies=self.policies,
            mover=WatchedMover(self.mover if host_slots else NoMover(), canary),
            executor=WatchedExecutor(self.executor, canary, self.ledger.sequences, layers),
            desk=self.desk,
            usage=self.usage,
            clock=self.clock,
        )

    def submit(self, *requests: Request) -> None:
        self.desk.inbox += [Submit(request) for request in requests]

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORTED) -> None:
        self.desk.inbox.append(Abort(request_id, reason))

    def turn(self) -> None:
        self.loop.turn()

    def advance(self) -> bool:
        """To the next completion, and through it; False when nothing runs."""
        self.turn()
        end_s = self.executor.next_end_s
        if end_s is None:
            return not self.ledger.pool.still  # a move that ends wakes the loop
        self.clock.now_s = end_s
        self.turn()
        return True

    def run(self, most_turns: int = 20_000) -> None:
        for _ in range(most_turns):
            if not self.advance():
                return
        raise AssertionError(f"still running after {most_turns} turns")

    def tokens(self, request_id: str) -> list[int]:
        return [
            new.token_id
            for message in self.desk.sent
            if isinstance(message, Tokens) and message.request_id == request_id
            for new in message.new
        ]

    def endings(self, request_id: str) -> list[FinishReason | RefusalReason | None]:
        """Every last word on a request: finish reasons and refusals."""
        return [
            message.reason if isinstance(message, Refused) else message.finish
            for message in self.desk.sent
            if (isinstance(message, Refused) or (isinstance(message, Tokens) and message.finish is not None))
            and message.request_id == request_id
        ]

    def finished(self) -> list[str]:
        """Ids in the order in which their requests finished."""
        return [m.request_id for m in self.desk.sent if isinstance(m, Tokens) and m.finish is not None]


def request(
    name: str,
    prompt: int = 8,
    new: int = 4,
    *,
    arrival_s: float = 0.0,
    tier: ServiceTier = ServiceTier.DEFAULT,
    stop: tuple[int, ...] = (),
    first: int = 0,
    salt: str = "",
) -> Request:
    """Prompts of the same `first` token begin alike."""
    return Request(
        id=name,
        prompt=tuple(range(first, first + prompt)),
        max_new_tokens=new,
        sampling=Sampling(seed=0, temperature=0.0),
        arrival_s=arrival_s,
        tier=tier,
        stop_token_ids=stop,
        cache_salt=salt,
    )
