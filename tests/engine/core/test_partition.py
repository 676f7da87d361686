from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.lanes.partition import MAX_SPLITS, Partition, partition_table, sm_group, sm_table


def test_two_cores_have_one_split_and_one_core_has_none() -> None:
    assert partition_table(2).splits == (Partition(1, 1),)
    assert partition_table(1).splits == ()
    assert partition_table(1).whole == Partition(1, 1)


def test_an_h200_with_its_minimum_and_step() -> None:
    table = partition_table(132, minimum=8, step=8)
    assert len(table.splits) == MAX_SPLITS
    assert table.splits[0] == Partition(8, 124)
    assert table.splits[-1] == Partition(120, 12)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 16))
def test_every_split_uses_each_unit_once_and_gives_both_sides_the_minimum(units: int, minimum: int, step: int) -> None:
    table = partition_table(units, minimum=minimum, step=step)
    assert len(table.splits) <= MAX_SPLITS
    assert list(table.splits) == sorted(set(table.splits))
    for row in table.splits:
        assert row.decode_units + row.prefill_units == units
        assert row.decode_units % step == 0
        assert min(row.decode_units, row.prefill_units) >= minimum


@pytest.mark.parametrize("wrong", [{"units": 0}, {"units": 4, "minimum": 0}, {"units": 4, "step": 0}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        partition_table(**wrong)


@pytest.mark.parametrize(
    ("units", "capability", "group", "decode"),
    [
        pytest.param(132, (9, 0), 8, [8, 24, 48, 64, 80, 104, 120], id="H200 and H100"),
        pytest.param(108, (8, 0), 4, [4, 20, 36, 52, 72, 88, 104], id="A100"),
        pytest.param(142, (8, 9), 4, [4, 28, 48, 68, 92, 116, 136], id="L40S"),
        pytest.param(128, (8, 9), 4, [4, 24, 44, 64, 84, 104, 124], id="RTX 4090"),
        pytest.param(20, (8, 7), 4, [4, 8, 12, 16], id="small"),
        pytest.param(7, (8, 7), 4, [], id="too small to be split"),
    ],
)
def test_gpus(units: int, capability: tuple[int, int], group: int, decode: list[int]) -> None:
    table = sm_table(units, capability)
    assert sm_group(capability) == group
    assert [row.decode_units for row in table.splits] == decode
    assert table.whole == Partition(units, units)


def test_a_gpu_before_volta_has_no_lanes() -> None:
    with pytest.raises(ValueError, match="no green contexts"):
        sm_table(28, (6, 1))
