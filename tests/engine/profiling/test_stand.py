from __future__ import annotations

import pytest

from engine.profiling.virtual_stand import ROOM, VirtualStand, true_estimates, true_times
from tidelane.engine.estimation.estimates import Contention
from tidelane.engine.execution.executor import Completion
from tidelane.engine.lanes.partition import Partition, partition_table
from tidelane.engine.profiling.probes import Kind, Probe, probes
from tidelane.engine.profiling.stand import LaunchFailed, Stand
from tidelane.engine.scheduling.plan import Plan

CONTENTION = Contention(decode_slowdown=1.4, prefill_slowdown=1.1, guard=1.5)


def test_each_probe_takes_what_its_work_takes() -> None:
    virtual = VirtualStand(true_estimates(CONTENTION))
    found = [probe for probe in probes(virtual.table, ROOM) if probe.kind is not Kind.BESIDE]
    assert len(found) > 200
    for probe in found:
        assert virtual.stand.seconds(probe) == pytest.approx(true_times(probe.units).seconds(probe.work))


def test_slowdowns_are_those_side_by_side_over_those_alone() -> None:
    virtual = VirtualStand(true_estimates(CONTENTION))
    slowdowns = virtual.stand.slowdowns(Probe(Partition(1, 2), (100, 200), ((0, 1024),)))
    assert slowdowns is not None
    assert slowdowns.decode == pytest.approx(1.4)
    assert slowdowns.prefill == pytest.approx(1.1)


def test_a_pass_shorter_than_a_step_says_nothing() -> None:
    virtual = VirtualStand(true_estimates(CONTENTION))
    assert virtual.stand.slowdowns(Probe(Partition(1, 2), (5000,) * 8, ((0, 1),))) is None
    # Both were waited for: the next probe finds the lanes free.
    assert virtual.stand.seconds(Probe(Partition(3, 3), contexts=(10,))) > 0


def test_sequences_hold_blocks_of_their_own() -> None:
    virtual = VirtualStand(true_estimates(CONTENTION))
    probe = Probe(virtual.table.whole, (15, 16, 40), ((32, 33), (0, 48)), fused=True)
    virtual.stand.seconds(probe)
    held = {name: (sequence.computed, len(sequence.tokens)) for name, sequence in virtual.sequences.items()}
    assert held == {"d0": (15, 16), "d1": (16, 17), "d2": (40, 41), "p0": (32, 33), "p1": (0, 48)}
    blocks = [block for sequence in virtual.sequences.values() for block in sequence.blocks]
    assert blocks == list(range(probe.blocks(ROOM.block_tokens)))
    assert all(1 <= token < 100 for sequence in virtual.sequences.values() for token in sequence.tokens)
    virtual.stand.seconds(Probe(virtual.table.whole, contexts=(7,)))
    assert list(virtual.sequences) == ["d0"]


class _Failing:
    def launch(self, plan: Plan) -> None:
        self.plan = plan

    def poll(self) -> list[Completion]:
        return [Completion(self.plan.decode, self.plan.prefill, 2, 0.0, 1.0, failure="out of memory")]

    def forget(self, job: int) -> None: ...

    def close(self) -> None: ...


def test_a_launch_that_fails_is_no_measurement() -> None:
    stand = Stand(_Failing(), {}, lambda: None, layers=2, block_tokens=16, vocab_size=100)
    with pytest.raises(LaunchFailed, match="out of memory"):
        stand.seconds(Probe(partition_table(2).whole, contexts=(7,)))
