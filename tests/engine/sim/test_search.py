"""The highest rate at a level of attainment, on made-up curves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidelane.engine.sim.search import PRECISE, next_probe, rate_at


def test_it_lies_on_the_line_between_the_points_around_it() -> None:
    assert rate_at({1.0: 1.0, 2.0: 0.95, 4.0: 0.75}, 0.9) == pytest.approx(2.5)
    assert rate_at({1.0: 1.0, 2.0: 0.9, 4.0: 0.5}, 0.9) == 2.0


def test_the_highest_counts_where_the_curve_goes_up_and_down() -> None:
    assert rate_at({1.0: 0.95, 2.0: 0.85, 3.0: 0.92, 4.0: 0.52}, 0.9) == pytest.approx(3.05)


def test_no_rate_attains_it() -> None:
    assert rate_at({1.0: 0.8, 2.0: 0.7}, 0.9) is None
    assert next_probe({1.5: 0.8, 2.0: 0.7}, 0.9) == 0.5


def test_every_rate_attains_it() -> None:
    assert rate_at({1.0: 1.0, 2.0: 0.95}, 0.9) == 2.0
    assert next_probe({1.0: 1.0, 2.0: 0.95}, 0.9) == 4.0


def test_a_probe_narrows_the_bracket_until_it_is_narrow_enough() -> None:
    assert next_probe({1.0: 1.0, 2.0: 0.0}, 0.9) == pytest.approx(1.1)
    assert next_probe({1.0: 0.91, 2.0: 0.0}, 0.9) == pytest.approx(1.1)  # not at the end, though the line says so
    assert next_probe({1.0: 1.0, 2.0: 0.9 - 1e-9}, 0.9) == pytest.approx(1.9)
    assert next_probe({1.0: 0.95, PRECISE: 0.5}, 0.9) is None


@pytest.mark.parametrize(
    "curve",
    [
        lambda rate: 1.0 if rate < 7.3 else 0.0,
        lambda rate: max(0.0, 1 - (rate / 23.0) ** 2),
        lambda rate: 0.05 ** (rate / 40.0),
        lambda rate: 1.0 if rate < 0.4 else 0.3,
        lambda rate: 1.0 if rate < 300 else 0.3,
    ],
)
def test_probing_finds_it_from_any_grid(curve: Callable[[float], float]) -> None:
    tried = {rate: curve(rate) for rate in (1.0, 4.0, 16.0, 64.0)}
    for _ in range(25):
        rate = next_probe(tried, 0.9)
        if rate is None:
            break
        tried[rate] = curve(rate)
    found = rate_at(tried, 0.9)
    assert found is not None
    assert curve(found / 1.03) >= 0.9 > curve(found * 1.03)
