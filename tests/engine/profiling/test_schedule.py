from __future__ import annotations

from collections import Counter

import pytest

from engine.profiling.virtual_stand import ROOM
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.profiling.probes import Kind, Probe, probes
from tidelane.engine.profiling.schedule import FEWEST_POINTS, REPEATS, REPEATS_OF_SHORT, SHARES, SHORT_S, rounds

PROBES = probes(partition_table(2), ROOM)


def seconds(probe: Probe) -> float:
    return (0.05 + 0.002 * probe.work.tokens + 1e-5 * probe.work.context) / probe.units


def test_each_probe_comes_as_often_as_it_should_and_once_a_round() -> None:
    planned = rounds(PROBES, seconds, 1e9, seed=0)
    needed, others, *again = planned
    assert len(needed) + len(others) == len(PROBES)
    assert {*needed, *others} == {*again[0]} == {*PROBES}
    assert all(len(set(each)) == len(each) for each in planned)
    times = Counter(probe for each in planned for probe in each)
    assert all(times[probe] == (REPEATS_OF_SHORT if seconds(probe) <= SHORT_S else REPEATS) for probe in PROBES)


@pytest.mark.parametrize("budget_s", [150.0, 600.0])
def test_each_kind_keeps_to_its_share_of_the_budget(budget_s: float) -> None:
    planned = rounds(PROBES, seconds, budget_s, seed=0)
    for kind, share in SHARES.items():
        cost_s = sum(seconds(probe) for each in planned for probe in each if probe.kind is kind)
        assert 0 < cost_s <= share * budget_s


def test_what_a_fit_needs_is_measured_whatever_it_costs() -> None:
    first, others, *_ = rounds(PROBES, seconds, 0.0, seed=0)
    assert others == []
    points = Counter((probe.kind, probe.units) for probe in first)
    assert all(points[kind, units] == FEWEST_POINTS for kind in (Kind.DECODE, Kind.PREFILL) for units in (1, 2))
    assert points[Kind.FUSED, 2] == FEWEST_POINTS
    shortest = sorted(seconds(probe) for probe in PROBES if (probe.kind, probe.units) == (Kind.DECODE, 1))
    assert max(seconds(probe) for probe in first if (probe.kind, probe.units) == (Kind.DECODE, 1)) == shortest[9]


def test_more_time_gives_longer_passes() -> None:
    def longest(budget_s: float) -> float:
        return max(seconds(probe) for probe in rounds(PROBES, seconds, budget_s, seed=0)[1])

    assert longest(60.0) < longest(150.0) < longest(600.0)


def test_the_order_follows_the_seed_and_no_pattern() -> None:
    first, again, other = (rounds(PROBES, seconds, 150.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[2] != first[3]
    # Kinds are mixed: no long stretch of one.
    kinds = [probe.kind for probe in first[2]]
    assert max(kinds.index(kind) for kind in Kind) < len(kinds) / 2
