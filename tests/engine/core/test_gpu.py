"""Decisions about a GPU that need none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.gpu import first_estimates, kv_blocks, step_rows
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.profiling.probes import Probe

LAYOUT = KVLayout(layers=2, heads=2, key_dim=8, value_dim=8, element_bytes=2)  # 2 KiB a block


def test_blocks_are_what_fits_less_one_that_is_nobodys() -> None:
    assert kv_blocks(LAYOUT, 100 << 20, 20 << 10) == 9
    assert kv_blocks(LAYOUT, 10 << 11, None) == 7  # a fifth of the memory stays free


@pytest.mark.parametrize(("free", "asked", "why"), [(1000, 2000, "does not fit"), (1 << 20, 3 << 10, "too small")])
def test_a_pool_that_cannot_be_is_refused(free: int, asked: int, why: str) -> None:
    with pytest.raises(CannotServe, match=why):
        kv_blocks(LAYOUT, free, asked)


def test_graphs_are_as_large_as_memory_allows() -> None:
    assert step_rows(256, 128_256, lanes=8, free_bytes=120 << 30) == 256  # an H200 with an 8B model
    assert step_rows(256, 128_256, lanes=8, free_bytes=7 << 30) == 61  # an RTX 4090
    assert step_rows(256, 128_256, lanes=8, free_bytes=1 << 20) == 1


@given(st.integers(40, 100_000), st.sampled_from([1, 16, 256]))
def test_first_estimates_find_a_linear_machine(room: int, most_rows: int) -> None:
    """And ask for nothing that there is no room for, each thing twice."""
    table = partition_table(4)
    step = PassTimes((1, 256), (0.01, 0.03), context_s=1e-6)
    prompt = PassTimes((64, 4096), (0.02, 0.5), pair_s=1e-8)
    asked: list[Probe] = []

    def seconds(probe: Probe) -> float:
        assert sum(probe.held) <= room
        assert len(probe.contexts) <= most_rows
        asked.append(probe)
        return (step if probe.contexts else prompt).seconds(probe.work) / probe.units

    found = first_estimates(seconds, table.splits, table.whole, room=room, most_rows=most_rows)
    assert asked[::2] == asked[1::2]
    for probe in asked:
        phase = Phase.DECODE if probe.contexts else Phase.PREFILL
        expected = (step if probe.contexts else prompt).seconds(probe.work) / probe.units
        assert found.seconds(phase, probe.units, probe.work) == pytest.approx(expected, rel=0.15)
