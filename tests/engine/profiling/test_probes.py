from __future__ import annotations

from collections import defaultdict

import pytest

from engine.profiling.virtual_stand import ROOM
from tidelane.engine.estimation.passes import PassWork
from tidelane.engine.lanes.partition import Partition, partition_table
from tidelane.engine.profiling.probes import BATCHES, NEW_TOKENS, Kind, Probe, Room, probes, uneven

WHOLE = Partition(2, 2)
SPLIT = Partition(1, 1)


def test_each_row_of_the_table_is_measured() -> None:
    table = partition_table(4)
    units = defaultdict(set)
    for probe in probes(table, ROOM):
        units[probe.kind].add(probe.units)
        assert probe.partition in (*table.splits, table.whole)
    assert units == {
        Kind.DECODE: {1, 2, 3, 4},
        Kind.PREFILL: {1, 2, 3, 4},
        Kind.FUSED: {4},
        Kind.BESIDE: {1, 2, 3},
    }


def test_one_unit_has_nothing_side_by_side() -> None:
    assert {probe.kind for probe in probes(partition_table(1), ROOM)} == {Kind.DECODE, Kind.PREFILL, Kind.FUSED}


def test_no_probe_comes_twice() -> None:
    found = probes(partition_table(4), ROOM)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("room", "batches", "longest"),
    [
        (Room(8192, 100_000, 16), set(BATCHES), 8192),
        (Room(1024, 100_000, 16), set(BATCHES), 1024),
        (Room(8192, 40, 16), {1, 2, 3, 4, 6, 8}, 640),
    ],
)
def test_what_fits_the_room(room: Room, batches: set[int], longest: int) -> None:
    found = probes(partition_table(2), room)
    assert {len(probe.contexts) for probe in found if probe.kind is Kind.DECODE} == batches
    assert max(max(probe.held) for probe in found) <= longest
    assert max(probe.blocks(16) for probe in found) <= room.blocks


def test_prompts_of_each_size_come_whole_and_otherwise() -> None:
    on_one = [probe for probe in probes(partition_table(2), ROOM) if probe.kind is Kind.PREFILL and probe.units == 1]
    whole = {probe.spans[0][1] for probe in on_one if probe.spans == ((0, probe.work.tokens),)}
    assert whole == set(NEW_TOKENS)
    # What a fit tells tokens, pairs and sequences apart by.
    assert sum(probe.work.sequences > 1 for probe in on_one) >= 5
    assert sum(probe.spans[0][0] > 0 for probe in on_one) >= 5


def test_the_contexts_of_a_batch_differ_but_not_in_all() -> None:
    assert uneven(1, 48) == (48,)
    assert uneven(4, 60) == (30, 50, 70, 90)
    assert sum(uneven(64, 512)) == pytest.approx(64 * 512, rel=0.01)


def test_kind_units_and_work() -> None:
    step = Probe(SPLIT, contexts=(10, 20))
    assert (step.kind, step.units, step.work) == (Kind.DECODE, 1, PassWork(2, 0, 30, 2))
    assert step.held == (11, 21)
    assert step.blocks(16) == 3
    prompt = Probe(WHOLE, spans=((4, 8), (0, 2)))
    assert (prompt.kind, prompt.units, prompt.work) == (Kind.PREFILL, 2, PassWork(6, 26 + 3, 0, 2))
    assert prompt.held == (8, 2)
    fused = Probe(WHOLE, (10, 20), ((4, 8),), fused=True)
    assert (fused.kind, fused.units, fused.work) == (Kind.FUSED, 2, PassWork(6, 26, 30, 3))
    beside = Probe(Partition(3, 1), (10, 20), ((4, 8),))
    assert (beside.kind, beside.units) == (Kind.BESIDE, 3)
