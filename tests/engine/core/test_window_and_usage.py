from __future__ import annotations

import pytest

from tidelane.engine.scheduling.plan import DecodeBatch, Flight, PrefillSlice, Span
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.slo import Attainment, Slo, Timeline, percentile
from tidelane.engine.usage import Usage, Use
from tidelane.engine.window import LatencyWindow

SLO = Slo(ttft_s=0.2, tpot_s=0.05, ttft_per_1k_input_tokens_s=0.1)


def timeline(ttft_s: float, tpot_s: float, input_tokens: int = 0, output_tokens: int = 11) -> Timeline:
    return Timeline(0.0, ttft_s / 2, ttft_s, ttft_s + tpot_s * (output_tokens - 1), input_tokens, output_tokens)


def test_meeting_an_slo_needs_both_targets() -> None:
    assert timeline(0.2, 0.05).meets(SLO)
    assert not timeline(0.21, 0.05).meets(SLO)
    assert not timeline(0.2, 0.051).meets(SLO)


def test_long_prompts_have_an_allowance() -> None:
    assert timeline(1.2, 0.01, input_tokens=10_000).meets(SLO)
    assert not timeline(1.21, 0.01, input_tokens=10_000).meets(SLO)


def test_one_token_has_no_tpot() -> None:
    assert timeline(0.1, 99.0, output_tokens=1).tpot_s == 0.0


def test_nearest_rank_percentiles() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 1) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    "wrong", [{"ttft_s": 0}, {"tpot_s": 0}, {"percentile": 0}, {"percentile": 100}, {"ttft_per_1k_input_tokens_s": -1}]
)
def test_targets_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Slo(**{"ttft_s": 1, "tpot_s": 1, **wrong})  # type: ignore[arg-type]


def test_the_window_counts_what_ended_in_it() -> None:
    clock = VirtualClock()
    window = LatencyWindow(clock, window_s=60)
    window.add(timeline(9.0, 0.01), SLO)
    clock.now_s = 50
    window.add(timeline(0.1, 0.01), SLO)
    window.add(timeline(0.1, 0.02), SLO)
    window.add(None, SLO)  # refused: missed
    clock.now_s = 61
    summary = window.summary(99)
    assert summary.attainment == Attainment(requests=3, within_slo=2, window_s=60)
    assert summary.attainment.goodput_rps == pytest.approx(2 / 60)
    assert summary.ttft_p99_s == 0.1
    assert summary.tpot_p50_s == pytest.approx(0.01)
    assert summary.ttft_target_ratio_at_percentile == pytest.approx(0.5)


def test_the_window_tells_the_parts_of_ttft() -> None:
    window = LatencyWindow(VirtualClock())
    # The longest waits are not those of the longest prompts.
    for nth in range(1, 21):
        queue_s, prefill_s = nth / 100, 1 - nth / 100
        window.add(Timeline(0.0, queue_s, queue_s + prefill_s, 2.0, 10, 2), SLO)
    summary = window.summary(95)
    assert summary.queue_p90_s == pytest.approx(0.18)
    assert summary.queue_at_percentile_s == pytest.approx(0.19)
    assert summary.queue_p99_s == pytest.approx(0.2)
    assert summary.prefill_p50_s == pytest.approx(0.89)
    assert summary.prefill_at_percentile_s == pytest.approx(0.98)
    assert LatencyWindow(VirtualClock()).summary(99).queue_p90_s is None


def test_an_empty_window_has_no_percentiles() -> None:
    summary = LatencyWindow(VirtualClock()).summary(99)
    assert summary.attainment.share is None
    assert summary.ttft_p50_s is None


def test_usage_tells_the_realised_split_from_the_nominal_one() -> None:
    usage = Usage(4, 0.0)
    decode, prefill = DecodeBatch(("a",)), PrefillSlice(1, (Span("b", 0, 8),), 0, 2)
    usage.launched((4, 4))
    usage.note(Flight(decode, 4), 1.0)
    assert usage.nominal == (0, 0)
    usage.note(Flight(decode, 1, prefill, 3), 3.0)
    usage.launched((1, 3))
    assert usage.nominal == (1, 3)
    usage.note(Flight(None, 0, prefill, 3), 6.0)
    usage.launched((4, 4))
    assert usage.nominal == (1, 3), "the last split, also while one phase has the whole device"
    usage.note(Flight(decode, 4, prefill, 4), 10.0)
    usage.note(Flight(), 15.0)
    usage.note(Flight(), 21.0)
    assert usage.seconds == {
        Use.IDLE: 7.0,
        Use.DECODE_ALONE: 2.0,
        Use.SPLIT: 3.0,
        Use.PREFILL_ALONE: 4.0,
        Use.MIXED: 5.0,
    }
    assert usage.border_moves == 2
    # 2 s on 4 units, 3 s on 1, 5 s on 4: 31 unit-seconds over 10 s of 4 units
    assert usage.realised().decode_unit_share == pytest.approx(31 / 40)


def test_realised_shares_are_those_of_the_window() -> None:
    usage = Usage(4, 0.0, window_s=60.0)
    assert usage.realised().decode_unit_share is None
    assert usage.realised().shares == dict.fromkeys(Use, 0.0)
    decode, prefill = DecodeBatch(("a",)), PrefillSlice(1, (Span("b", 0, 8),), 0, 2)
    for second in range(200):  # decode alone on all units until 170, then beside prefill on one of four
        usage.note(Flight(decode, 4) if second < 170 else Flight(decode, 1, prefill, 3), float(second))
    usage.note(Flight(), 200.0)
    realised = usage.realised()
    assert realised.shares[Use.SPLIT] == pytest.approx(0.5)
    assert realised.shares[Use.DECODE_ALONE] == pytest.approx(0.5)
    assert realised.decode_unit_share == pytest.approx((30 * 4 + 30 * 1) / 60 / 4)
    assert usage.seconds[Use.DECODE_ALONE] == 170
