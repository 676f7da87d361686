from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.estimation.guard import GuardTable, cell_of, reused_tokens
from tidelane.engine.estimation.passes import NO_WORK, decode_work, prefill_work

UNSEEN = 1.2
CELL = (8192, 2048, 32, 32768)


def seen_once(units: int, slowdown: float) -> GuardTable:
    return GuardTable().observed(units, CELL, slowdown, UNSEEN)


@pytest.mark.parametrize(
    ("decode", "prefill", "cell"),
    [
        (decode_work(1, 0), prefill_work([(0, 1)]), (2048, 2048, 1, 2048)),
        (decode_work(3, 2049), prefill_work([(0, 2049)]), (8192, 2048, 4, 8192)),
        (decode_work(32, 32768), prefill_work([(0, 8192)]), (8192, 2048, 32, 32768)),
        (decode_work(33, 10**6), prefill_work([(8193, 8194)]), (2048, 32768, 64, 131072)),
        (decode_work(5000, 10**6), prefill_work([(0, 10**6)]), (131072, 2048, 1024, 131072)),
        (NO_WORK, NO_WORK, (2048, 2048, 1, 2048)),
    ],
)
def test_cells_are_named_by_their_upper_ends(decode: object, prefill: object, cell: tuple[int, int, int, int]) -> None:
    assert cell_of(decode, prefill) == cell  # type: ignore[arg-type]


@given(st.integers(0, 10**5), st.integers(1, 10**4), st.integers(1, 8))
def test_reused_tokens_come_back_from_the_pairs(start: int, new: int, sequences: int) -> None:
    assert reused_tokens(prefill_work([(start, start + new)] * sequences)) == pytest.approx(start * sequences, abs=1e-3)


def test_a_larger_slowdown_is_believed_at_once() -> None:
    assert seen_once(16, 1.4).factor(16, CELL, UNSEEN) == 1.4


def test_a_calm_step_in_a_new_cell_takes_little_off_the_guard() -> None:
    assert 1.19 < seen_once(16, 1.0).factor(16, CELL, UNSEEN) < UNSEEN


def test_a_blank_cell_takes_its_neighbours_largest() -> None:
    new, reused, batch, context = CELL
    table = seen_once(16, 1.3).observed(16, (new * 16, reused, batch, context), 1.4, UNSEEN)
    assert table.factor(16, (new * 4, reused, batch, context), UNSEEN) == 1.4
    assert table.factor(16, (new, reused, batch * 2, context), UNSEEN) == 1.3
    assert table.factor(16, (new, reused, batch * 4, context), UNSEEN) == UNSEEN


def test_a_blank_partition_takes_the_same_cell_of_the_nearest() -> None:
    table = seen_once(16, 1.3).observed(64, CELL, 1.5, UNSEEN)
    assert table.factor(24, CELL, UNSEEN) == 1.3
    assert table.factor(96, CELL, UNSEEN) == 1.5
    assert table.factor(32, CELL, UNSEEN) == 1.5  # as near to both: the larger


def test_nothing_seen_means_the_guard_of_all() -> None:
    assert GuardTable().factor(16, CELL, UNSEEN) == UNSEEN


def test_an_outlier_counts_as_two_and_is_forgotten() -> None:
    table = seen_once(16, 50.0)
    assert table.factor(16, CELL, UNSEEN) == 2.0
    for _ in range(120):
        table = table.observed(16, CELL, 1.1, UNSEEN)
    assert table.factor(16, CELL, UNSEEN) < 1.2


@given(st.lists(st.tuples(st.sampled_from([8, 16, 64]), st.floats(0, 100)), max_size=50))
def test_factors_lie_between_one_and_two(seen: list[tuple[int, float]]) -> None:
    table = GuardTable()
    for units, slowdown in seen:
        table = table.observed(units, CELL, slowdown, UNSEEN)
        assert 1 <= table.factor(units, CELL, UNSEEN) <= 2
        assert table.factor(units, CELL, UNSEEN) >= min(slowdown, 2.0)
