"""Traffic made of a sketch is like the traffic that was sketched."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.sim.synthetic import TooLittleSeen, synthetic
from tidelane.engine.sim.world import Settings, replay
from tidelane.engine.workload import Lengths, Sketch, Tally

from .machines import SLO, machine


def sketched(traffic: Traffic) -> Sketch:
    tally = Tally()
    before_s: float | None = None
    for each in traffic.arrivals:
        tally.arrived(None if before_s is None else each.at_s - before_s, each.input_tokens, flex=each.tier == "flex")
        tally.began(len(each.hash_ids) * traffic.hashed_tokens)
        tally.ended(each.output_tokens)
        before_s = each.at_s
    return tally.sketch(traffic.duration_s)


def distance(one: Lengths, other: Lengths) -> float:
    """Of Kolmogorov and Smirnov: the largest difference of the shares below any length."""
    most, of_one, of_other = 0.0, 0.0, 0.0
    for at in range(max(len(one.counts), len(other.counts))):
        of_one += one.counts[at] / one.requests if at < len(one.counts) else 0.0
        of_other += other.counts[at] / other.requests if at < len(other.counts) else 0.0
        most = max(most, abs(of_one - of_other))
    return most


kinds = st.tuples(st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 300), st.integers(0, 100))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(kinds, min_size=1, max_size=4),
    st.floats(0.05, 50.0),
    st.floats(0.05, 8.0),
    st.floats(0.0, 1.0),
    st.integers(0, 9),
)
def test_the_sketch_of_traffic_made_of_a_sketch_is_the_sketch(
    of_kinds: list[tuple[int, int, int, int]], rate_rps: float, burstiness: float, flex: float, seed: int
) -> None:
    """Kinds of request: (least prompt, spread, least output, reused percent)."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    for number in range(600):
        low, spread, output, percent = of_kinds[number % len(of_kinds)]
        prompt = draw.randint(low, low + spread)
        reused = prompt * percent // 101 // 16
        tier = "flex" if draw.random() < flex else ""
        arrivals.append(
            Arrival(at_s, prompt, draw.randint(output, 2 * output), hash_ids=tuple(range(reused)), tier=tier)
        )
        at_s += draw.gammavariate(1 / burstiness, burstiness / rate_rps)
    seen = sketched(Traffic(tuple(arrivals), at_s, hashed_tokens=16))
    made = synthetic(seen, 1200, seed)
    again = sketched(made)

    assert again.rate_rps == pytest.approx(seen.rate_rps, rel=1e-6)
    # A gamma sample's squared variation scatters by about sqrt((2 + 6 c) / n) of itself, where c is the burstiness.
    assert again.burstiness == pytest.approx(seen.burstiness, rel=0.2 + 0.12 * seen.burstiness, abs=0.05)
    assert again.flex_share == pytest.approx(seen.flex_share, abs=0.002)
    for one, other in ((again.prompts, seen.prompts), (again.outputs, seen.outputs)):
        assert other.mean == pytest.approx(one.mean, rel=0.01, abs=0.5)
        assert distance(one, other) <= 0.002
    # A prompt keeps one token to compute, and its reused part is told in blocks of 16 tokens.
    assert abs(again.reused.mean - seen.reused.mean) <= 16 + 0.01 * seen.reused.mean
    for each in made.arrivals:
        assert 16 * len(each.hash_ids) < each.input_tokens
    assert all(after.at_s >= before.at_s for before, after in pairwise(made.arrivals))


def test_the_same_seed_makes_the_same_traffic() -> None:
    sketch = Sketch(10.0, 20, 5, prompts=Lengths((0, 0, 4), 8), outputs=Lengths((0, 3), 3))
    assert synthetic(sketch, 50, 1) == synthetic(sketch, 50, 1)
    assert synthetic(sketch, 50, 1) != synthetic(sketch, 50, 2)


def test_the_reused_part_of_prompts_is_found_in_the_simulator() -> None:
    tally = Tally()
    for number in range(40):
        tally.arrived(0.5 if number else None, 320, flex=False)
        tally.began(160)
        tally.ended(4)
    made = synthetic(tally.sketch(20.0), 200, 0)
    found = replay(made, machine(), lambda: policy("mixed"), Settings(SLO)).found
    assert found.cached_tokens == pytest.approx(160 * 199, rel=0.03)


def test_nothing_is_made_of_nothing() -> None:
    for sketch in (Sketch(), Sketch(10.0, 4, prompts=Lengths((0, 4), 4))):
        with pytest.raises(TooLittleSeen, match="no request has come and ended"):
            synthetic(sketch, 10, 0)
