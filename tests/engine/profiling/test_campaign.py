"""From a machine whose times are known to the profile of it."""

from __future__ import annotations

from datetime import date

import pytest

from engine.profiling.virtual_stand import ROOM, UNITS, VirtualStand, true_estimates, true_times
from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.guard import cell_of
from tidelane.engine.estimation.passes import decode_work, prefill_work
from tidelane.engine.estimation.profile import ProfileKey
from tidelane.engine.profiling.campaign import Measurements, expected_s, measure, usual_s
from tidelane.engine.profiling.probes import Kind, Probe, probes
from tidelane.engine.profiling.stand import Slowdowns
from tidelane.engine.profiling.verdict import TooFewPoints, Verdict, contention, guards, judge

CONTENTION = Contention(decode_slowdown=1.4, prefill_slowdown=1.1, guard=1.5)
KEY = ProfileKey("digest", "virtual", UNITS, "float32", 6)
TODAY = date(2026, 1, 31)


def slow_prior() -> Estimates:
    """Twice the truth, as if the machine had been busy."""
    by_units = {units: true_times(units).scaled(2.0) for units in range(1, UNITS + 1)}
    return Estimates(dict.fromkeys(Phase, by_units), Contention(1.0, 1.0, 1.0))


def campaign(
    budget_s: float, *, sigma: float = 0.0, seed: int = 0
) -> tuple[VirtualStand, Measurements, list[tuple[int, int]]]:
    virtual = VirtualStand(true_estimates(CONTENTION), sigma)
    told: list[tuple[int, int]] = []
    found = measure(
        virtual.stand,
        probes(virtual.table, ROOM),
        slow_prior(),
        budget_s=budget_s,
        seed=seed,
        clock=virtual.clock,
        tell=lambda gone, of: told.append((gone, of)),
    )
    return virtual, found, told


def judged(found: Measurements) -> Verdict:
    return judge(KEY, TODAY, found, slow_prior())


def test_what_is_measured_without_noise_is_what_is() -> None:
    _, found, _ = campaign(150.0)
    verdict = judged(found)
    profile = verdict.profile
    assert (profile.key, profile.measured) == (KEY, TODAY)
    estimates = profile.estimates()
    for units in range(1, UNITS + 1):
        for work in (prefill_work(((0, 100),)), prefill_work(((512, 600),)), prefill_work(((0, 50), (256, 300)))):
            assert estimates.seconds(Phase.PREFILL, units, work) == pytest.approx(
                true_times(units).seconds(work), rel=0.02
            )
        for batch in (1, 5, 20, 60):
            work = decode_work(batch, batch * 200)
            assert estimates.seconds(Phase.DECODE, units, work) == pytest.approx(
                true_times(units).seconds(work), rel=0.05
            )
    fused = decode_work(16, 2000) + prefill_work(((0, 200),))
    assert estimates.seconds(Phase.FUSED, UNITS, fused) == pytest.approx(true_times(UNITS).seconds(fused), rel=0.03)
    assert profile.contention.decode_slowdown == pytest.approx(1.4)
    assert profile.contention.prefill_slowdown == pytest.approx(1.1)
    assert profile.contention.guard == pytest.approx(1.4)


def test_errors_are_told_by_phase_and_units_beside_those_of_the_prior() -> None:
    _, found, _ = campaign(150.0, sigma=0.1)
    verdict = judged(found)
    told = [(finding.phase, finding.units) for finding in verdict.findings]
    assert told == [
        *((Phase.DECODE, units) for units in (1, 2, 3, None)),
        *((Phase.PREFILL, units) for units in (1, 2, 3, None)),
        (Phase.FUSED, 3),
        (Phase.FUSED, None),
    ]
    for finding in verdict.findings:
        # Noise of 10 %, of which the median of three leaves 6 to 7 %; and the prior is wrong by a factor of 2.
        assert 0.02 < finding.error.median < 0.10
        assert finding.error.median < finding.error.p90 < 0.25
        assert finding.prior.median == pytest.approx(1.0, abs=0.1)
        assert finding.gain == pytest.approx(finding.prior.median / finding.error.median)
        if finding.units is not None:
            assert verdict.profile.errors[finding.phase][finding.units] == finding.error
    pooled = [finding for finding in verdict.findings if finding.phase is Phase.DECODE]
    assert pooled[-1].points == sum(finding.points for finding in pooled[:-1])


def test_the_time_is_kept_and_told() -> None:
    virtual, found, told = campaign(60.0)
    # The prior is twice too slow, so what was planned takes little more than half the time.
    assert 20.0 < virtual.clock.now_s < 40.0
    assert told[0][0] == 0
    assert [gone for gone, _ in told] == sorted(gone for gone, _ in told)
    assert {of for _, of in told} <= set(range(61))
    assert all(probe.kind is not Kind.BESIDE for probe in found.seconds)


def test_on_a_machine_slower_than_expected_the_clock_ends_it() -> None:
    virtual = VirtualStand(true_estimates(CONTENTION))
    fast = Estimates({phase: {1: true_times(1).scaled(0.01)} for phase in Phase}, CONTENTION)
    chosen = probes(virtual.table, ROOM)
    found = measure(virtual.stand, chosen, fast, budget_s=2.0, seed=0, clock=virtual.clock, tell=lambda gone, of: None)
    longest_s = max(true_times(1).seconds(probe.work) for probe in chosen)
    assert 2.0 <= virtual.clock.now_s < 2.0 + 3 * longest_s
    assert 0 < len(found.seconds) < len(chosen) / 2
    with pytest.raises(TooFewPoints, match=r"too few|nothing was measured"):
        judged(found)


def test_the_same_seed_measures_the_same() -> None:
    _, first, _ = campaign(60.0, sigma=0.1, seed=3)
    _, again, _ = campaign(60.0, sigma=0.1, seed=3)
    _, other, _ = campaign(60.0, sigma=0.1, seed=4)
    assert first == again
    assert first != other


def test_one_stall_is_not_contention() -> None:
    virtual = VirtualStand(true_estimates(CONTENTION))
    beside = [probe for probe in probes(virtual.table, ROOM) if probe.kind is Kind.BESIDE]
    calm, stalled = Slowdowns(1.2, 1.0), Slowdowns(9.0, 9.0)
    found = contention(Measurements({}, {beside[0]: (calm, stalled, calm)}), slow_prior())
    assert found == Contention(1.2, 1.0, 1.2)
    # A machine that is faster side by side was disturbed alone; one that crawls tells of something else.
    odd = Measurements({}, {beside[0]: (Slowdowns(0.8, 0.7),), beside[1]: (Slowdowns(5.0, 1.5),)})
    assert contention(odd, slow_prior()) == Contention(1.5, 1.25, 2.0)


def test_the_guard_of_a_cell_is_the_largest_slowdown_in_it() -> None:
    beside = [probe for probe in probes(VirtualStand(slow_prior()).table, ROOM) if probe.kind is Kind.BESIDE]
    calm, stalled = Slowdowns(1.2, 1.0), Slowdowns(9.0, 9.0)
    found = Measurements({}, {beside[0]: (calm, stalled, calm), beside[1]: (Slowdowns(1.3, 1.0),)})
    cell = cell_of(beside[0].decode, beside[0].prefill)
    assert cell == cell_of(beside[1].decode, beside[1].prefill)
    assert guards(found).seen == {beside[0].units: {cell: 1.3}}


def test_without_a_split_contention_is_the_priors() -> None:
    assert contention(Measurements({}, {}), slow_prior()) == Contention(1.0, 1.0, 1.0)


def test_a_probe_side_by_side_costs_both_and_what_is_timed_alone() -> None:
    probe = Probe(VirtualStand(slow_prior()).table.splits[0], (100,), ((0, 256),))
    step_s = 2 * true_times(1).seconds(probe.decode)
    pass_s = 2 * true_times(2).seconds(probe.prefill)
    assert expected_s(slow_prior(), probe) == pytest.approx(5 * step_s + 2 * pass_s)


def test_of_each_probe_the_least_counts_and_what_is_usual_on_top() -> None:
    chosen = probes(VirtualStand(slow_prior()).table, ROOM)
    one, two, three = [probe for probe in chosen if probe.kind is Kind.DECODE][:3]
    prefill = next(probe for probe in chosen if probe.kind is Kind.PREFILL)
    times = {one: [0.10, 0.12, 0.11], two: [0.20, 0.20, 0.90], three: [0.30, 0.60, 0.36], prefill: [1.0, 1.5, 1.4]}
    # Medians are 1.1, 1.0 and 1.2 times the least of a step, and 1.4 times that of a pass.
    assert usual_s(times) == pytest.approx({one: 0.11, two: 0.22, three: 0.33, prefill: 1.4})
