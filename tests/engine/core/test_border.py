from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.lanes.partition import Partition, partition_table
from tidelane.engine.scheduling.border import (
    GUARD_MAX,
    GUARD_MIN,
    GUARD_START,
    Border,
    learn,
    place_border,
    predicted_step_s,
)
from tidelane.engine.scheduling.plan import Objective
from tidelane.engine.slo import Slo

TABLE = partition_table(8)
OBJECTIVE = Objective(Slo(ttft_s=1, tpot_s=0.1))


def test_decode_gets_the_smallest_share_that_fits_its_target() -> None:
    steps = {1: 0.2, 2: 0.1, 3: 0.08, 4: 0.07, 5: 0.06, 6: 0.05, 7: 0.05}
    border = place_border(Border(guard=1.0), TABLE, steps, 0.1, OBJECTIVE)
    assert border.row == Partition(2, 6)


def test_the_guard_widens_decode() -> None:
    steps = {1: 0.2, 2: 0.1, 3: 0.08, 4: 0.07}
    assert place_border(Border(guard=1.3), TABLE, steps, 0.1, OBJECTIVE).row == Partition(4, 4)


def test_out_of_reach_gives_decode_the_widest_lane_and_prefill_the_rest() -> None:
    assert place_border(Border(), TABLE, {4: 1.0}, 0.01, OBJECTIVE).row == Partition(7, 1)


def test_decode_always_keeps_a_lane() -> None:
    assert place_border(Border(), TABLE, {4: 1e-6}, 10.0, OBJECTIVE).row == Partition(1, 7)


def test_narrowing_needs_more_to_spare_than_staying() -> None:
    steps = {2: 0.095, 3: 0.08}
    wide = Border(row=Partition(3, 5), guard=1.0)
    assert place_border(wide, TABLE, steps, 0.1, OBJECTIVE).row == Partition(3, 5)
    narrow = Border(row=Partition(2, 6), guard=1.0)
    assert place_border(narrow, TABLE, steps, 0.1, OBJECTIVE).row == Partition(2, 6)


def test_bounds_hold_even_when_the_target_does_not() -> None:
    bounded = Objective(OBJECTIVE.slo, min_decode_share=0.25, max_decode_share=0.5)
    assert place_border(Border(), TABLE, {4: 1.0}, 0.01, bounded).row == Partition(4, 4)
    assert place_border(Border(), TABLE, {4: 1e-6}, 1.0, bounded).row == Partition(2, 6)


def test_bounds_that_no_row_meets_are_no_reason_to_stop() -> None:
    between = Objective(OBJECTIVE.slo, min_decode_share=0.51, max_decode_share=0.6)
    assert place_border(Border(), TABLE, {4: 0.01}, 0.1, between).row in TABLE.splits


def test_a_share_not_measured_is_told_from_the_nearest() -> None:
    assert predicted_step_s(1, {}) == 0.0
    assert predicted_step_s(4, {4: 0.05, 8: 0.01}) == 0.05
    assert predicted_step_s(1, {4: 0.05}) == pytest.approx(0.1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=200))
def test_feedback_keeps_the_guard_within_bounds(outcomes: list[tuple[bool, bool]]) -> None:
    border = Border()
    for missed_tpot, missed_ttft in outcomes:
        before = border.guard
        border = learn(border, missed_tpot=missed_tpot, missed_ttft=missed_ttft)
        assert GUARD_MIN <= border.guard <= GUARD_MAX
        assert border.guard >= before if missed_tpot else border.guard <= before
    if not outcomes:
        assert border.guard == GUARD_START
