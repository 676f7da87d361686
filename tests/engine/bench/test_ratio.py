"""Ratios: the line a person reads, and what counts as met."""

from __future__ import annotations

import pytest

from tidelane.engine.bench.engine import exit_code
from tidelane.engine.bench.ratio import Measured, Ratio, interleaved

OVER = Measured("ours", (30.0, 10.0, 20.0), "tokens/s")
UNDER = Measured("theirs", (16.0, 1.0, 99.0), "tokens/s")


def test_medians_count_and_the_line_tells_all() -> None:
    ratio = Ratio("decode", OVER, UNDER, at_least=1.0)
    assert ratio.value == 1.25
    assert str(ratio) == "decode: 1.25 (ours 20 tokens/s, theirs 16 tokens/s; want >= 1): ok"


@pytest.mark.parametrize(
    ("at_least", "at_most", "met"), [(1.25, None, True), (1.26, None, False), (None, 1.25, True), (None, 1.24, False)]
)
def test_a_miss_is_said(at_least: float | None, at_most: float | None, met: bool) -> None:
    ratio = Ratio("decode", OVER, UNDER, at_least=at_least, at_most=at_most, price="5 s")
    assert ratio.met is met
    assert str(ratio).endswith(": ok [5 s]" if met else ": MISS [5 s]")


def test_a_miss_fails_only_when_strict() -> None:
    met, missed = Ratio("a", OVER, UNDER, at_least=1.0), Ratio("b", OVER, UNDER, at_least=2.0)
    assert exit_code([met, missed], strict=False) == 0
    assert exit_code([met, missed], strict=True) == 1
    assert exit_code([met], strict=True) == 0


def test_samples_are_taken_in_turns() -> None:
    order: list[str] = []

    def sampler(name: str, value: float) -> float:
        order.append(name)
        return value

    taken = interleaved(lambda: sampler("a", 1.0), lambda: sampler("b", 2.0), 3)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert taken == ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
