"""One engine in virtual time: the ledger, loop and policies of a real one over a virtual executor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from tidelane.engine.bench.traffic import HASHED_TOKENS
from tidelane.engine.kv.moves import NoMover
from tidelane.engine.kv.retention import IDLE_TIMEOUT_S, ByServiceTier
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.prefetch import NoLookAhead, Prefetcher
from tidelane.engine.request import Request
from tidelane.engine.scheduling.plan import Objective, Scheduler
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.sim.desk import POLICY, RecordingDesk
from tidelane.engine.sim.executor import VirtualExecutor
from tidelane.engine.sim.machine import Machine
from tidelane.engine.sim.noise import Noise
from tidelane.engine.sim.prefix import HashNames
from tidelane.engine.sim.shares import LaneShares
from tidelane.engine.sim.tiers import VirtualMover
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.usage import Usage

# How often the loop turns though nothing happened, as the real desk does with its heartbeats.
HEARTBEAT_S = 0.25


def _unheard(_timeline: Timeline | None, _slo: Slo) -> None:
    """The desk's messages tell all of it."""


class VirtualEngine:
    """`queue_limit` requests may wait; more are refused."""

    def __init__(
        self,
        machine: Machine,
        scheduler: Scheduler,
        objective: Objective,
        *,
        clock: VirtualClock,
        queue_limit: int,
        bucket_s: float,
        noise: Noise,
        hashed_tokens: int = HASHED_TOKENS,
    ) -> None:
        units = machine.table.units
        self.block_tokens = machine.block_tokens
        self._names = HashNames(machine.block_tokens, hashed_tokens)
        self.desk = RecordingDesk(self._names)
        self.usage = Usage(units, clock.now_s)
        self.shares = LaneShares(units, bucket_s)
        self._clock = clock
        # When something happens here if nothing arrives before; infinity if never.
        self.next_turn_s = math.inf

        self.ledger = Ledger(
            table=machine.table,
            layers=machine.layers,
            block_tokens=machine.block_tokens,
            blocks=machine.blocks,
            queue_limit=queue_limit,
            objective=objective,
            estimates=machine.believed,
            ended=_unheard,
            retention=lambda: ByServiceTier(IDLE_TIMEOUT_S, clock),
            names=self._names,
            host_slots=machine.tiers.host_slots,
            disk_slots=machine.tiers.disk_slots,
            fetch_s=machine.tiers.fetch_s,
            look_ahead=partial(Prefetcher, fetch_s=machine.tiers.fetch_s, clock=clock)
            if machine.tiers.prefetch
            else NoLookAhead,
        )
        self._mover = VirtualMover(clock, machine.tiers) if machine.tiers.host_slots else None
        self.executor = VirtualExecutor(
            clock=clock,
            units=units,
            layers=machine.layers,
            sequences=self.ledger.sequences,
            times=machine.times,
            shares=self.shares,
            noise=noise,
            overhead_s=machine.overhead_s,
            handover=machine.handover,
            mover=self._mover,
        )
        self._loop = Loop(
            ledger=self.ledger,
            policies={POLICY: scheduler},
            executor=self.executor,
            mover=self._mover or NoMover(),
            desk=self.desk,
            usage=self.usage,
            clock=clock,
        )

    def submit(self, request: Request, hashes: Sequence[int] = ()) -> None:
        self._names.expect(request.id, hashes)
        self.desk.submit(request)

    def turn(self, until_s: float) -> None:
        """All that is to do now. Nothing arrives before `until_s`."""
        launches = self.executor.launches
        self._loop.turn()
        if self.executor.launches > launches:
            self._run_on(min(until_s, self._look_ahead_s()))
        self.next_turn_s = self._next_s()

    def _next_s(self) -> float:
        next_s = self.executor.next_end_s
        running = next_s is not None
        if next_s is None:
            next_s = math.inf if self.ledger.empty else self._clock.now_s + HEARTBEAT_S
        if self._mover is not None:
            # While something runs, only who waits for the disk has use for a turn before that ends.
            moved_s = self._mover.next_fetch_s if running else self._mover.next_end_s
            next_s = next_s if moved_s is None else min(next_s, moved_s)
        return min(next_s, self._look_ahead_s())

    def _look_ahead_s(self) -> float:
        """When something is due for prompts that should come."""
        due_s = self.ledger.next_look_ahead_s
        if due_s is None or due_s <= self._clock.now_s:  # what is due and waits does so for something else
            due_s = math.inf
        moved_s = self._mover.next_end_s if self.ledger.brings_up and self._mover is not None else None
        return due_s if moved_s is None else min(due_s, moved_s)

    def _run_on(self, until_s: float) -> None:
        """Take the steps that follow the one just launched while there is nothing to decide, all at once.

        Whoever was launched with nothing waiting is launched again in the same way, as long as none ends, joins or
        lacks a block. Most steps of a light load are like that. They come to what turn after turn would come to, to
        the bit, but are not in the log of decisions.
        """
        steps = self.executor.run_on(self.ledger.steps_in_a_row(), until_s)
        for step in steps:
            self.usage.note(self.ledger.flight, step.ended_s)
        if steps:
            self.desk.run_on(steps)
            self.ledger.run_on(steps)

    @property
    def loaded_tokens(self) -> int:
        """That came from host memory to the device."""
        return self.ledger.pool.loaded_blocks * self.block_tokens

    @property
    def fetched_tokens(self) -> int:
        """That came from the disk to host memory."""
        return self.ledger.pool.fetched_blocks * self.block_tokens

    @property
    def working(self) -> bool:
        return self.executor.next_end_s is not None
