"""Virtual time, worked out by hand: lanes that slow each other down, and what a launch may not do."""

from __future__ import annotations

import pytest

from tidelane.engine.execution.executor import Completion
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.request import Request, Sampling
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice, Span
from tidelane.engine.sequence import Sequence
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.sim.executor import Handover, LanesOverlap, VirtualExecutor
from tidelane.engine.sim.noise import Noise
from tidelane.engine.sim.shares import LaneShares
from tidelane.engine.slo import Slo

from .machines import hand_made

HALVES = Partition(1, 3)
WHOLE = Partition(4, 4)


class Bench:
    """An executor over two sequences, `chat` that decodes and `long` with 300 tokens of prompt."""

    def __init__(self, *, overhead_s: float = 0.0, noise: float = 0.0, handover: Handover | None = None) -> None:
        self.clock = VirtualClock()
        self.shares = LaneShares(4, 1.0)
        self.sequences = {name: _sequence(name, tokens) for name, tokens in (("chat", 5), ("long", 300))}
        self.executor = VirtualExecutor(
            clock=self.clock,
            units=4,
            layers=10,
            sequences=self.sequences,
            times=hand_made(),
            shares=self.shares,
            noise=Noise(noise, "0"),
            overhead_s=overhead_s,
            handover=handover,
        )

    def decode(self, partition: Partition) -> None:
        self.executor.launch(Plan(partition, decode=DecodeBatch(("chat",))))

    def prefill(self, partition: Partition, layers: int = 10) -> None:
        self.executor.launch(Plan(partition, prefill=PrefillSlice(1, (Span("long", 0, 300),), 0, layers)))

    def next(self) -> Completion:
        """Step to the next completion, which must be the only one."""
        end_s = self.executor.next_end_s
        assert end_s is not None
        self.clock.now_s = end_s
        (completion,) = self.executor.poll()
        assert completion.ended_s == end_s
        return completion


def _sequence(name: str, tokens: int) -> Sequence:
    request = Request(name, (0,) * tokens, 10, Sampling(seed=0), arrival_s=0.0)
    return Sequence(request, Slo(1.0, 0.1))


def test_alone_each_takes_what_the_estimates_say() -> None:
    bench = Bench()
    bench.decode(WHOLE)
    assert bench.next().ended_s == pytest.approx(0.01)
    bench.prefill(WHOLE, layers=5)
    done = bench.next()
    assert done.ended_s == pytest.approx(0.01 + 0.15)
    assert done.sampled == ()
    bench.prefill(WHOLE)
    assert [(s.id, s.token is not None) for s in bench.next().sampled] == [("long", True)]


def test_what_is_left_of_one_lane_runs_at_full_speed_once_the_other_has_ended() -> None:
    bench = Bench()
    bench.prefill(HALVES)  # 0.4 s alone on 3 units
    bench.clock.now_s = 0.1
    bench.executor.poll()
    bench.decode(HALVES)  # 0.02 s alone on 1 unit; 0.025 s beside prefill, which then does 0.025 / 1.1 s of its work
    done = bench.next()
    assert done.decode is not None
    assert done.ended_s == pytest.approx(0.125)
    assert done.started_s == 0.1
    left_s = 0.4 - 0.1 - 0.025 / 1.1
    assert bench.next().ended_s == pytest.approx(0.125 + left_s)
    assert bench.executor.next_end_s is None


def test_a_step_that_outlives_the_slice_beside_it() -> None:
    bench = Bench()
    bench.prefill(HALVES, layers=1)  # 0.04 s alone: 0.044 s beside decode
    bench.clock.now_s = 0.03
    bench.decode(HALVES)  # the slice has 0.01 s left: 0.011 s now, in which the step does 0.011 / 1.25 s
    done = bench.next()
    assert done.prefill is not None
    assert done.ended_s == pytest.approx(0.041)
    assert bench.next().ended_s == pytest.approx(0.041 + 0.02 - 0.011 / 1.25)


def test_a_late_poll_changes_nothing() -> None:
    bench = Bench()
    bench.prefill(HALVES)
    bench.decode(HALVES)
    bench.clock.now_s = 5.0
    first, second = bench.executor.poll()
    assert first.ended_s == pytest.approx(0.025)
    assert second.ended_s == pytest.approx(0.025 + 0.4 - 0.025 / 1.1)


def test_a_fused_pass_is_one_launch_on_the_whole_device() -> None:
    bench = Bench()
    slice_ = PrefillSlice(1, (Span("long", 0, 299),), 0, 10)
    bench.executor.launch(Plan(WHOLE, decode=DecodeBatch(("chat",)), prefill=slice_, fused=True))
    done = bench.next()
    assert done.ended_s == pytest.approx(0.3)  # 299 tokens and one
    assert [(s.id, s.token is not None) for s in done.sampled] == [("chat", True), ("long", False)]
    (share,) = bench.shares.shares()
    assert (share.decode, share.prefill) == (0.0, 0.0)
    assert share.fused == pytest.approx(0.3)


def test_overhead_is_paid_by_every_launch() -> None:
    bench = Bench(overhead_s=0.002)
    bench.decode(WHOLE)
    assert bench.next().ended_s == pytest.approx(0.012)


def test_units_at_work_cannot_be_given_away() -> None:
    bench = Bench()
    bench.prefill(HALVES)
    with pytest.raises(LanesOverlap, match="4 units given away while 3 of 4"):
        bench.decode(WHOLE)
    with pytest.raises(LanesOverlap):
        bench.prefill(HALVES)


def test_noise_is_seeded_and_has_mean_1() -> None:
    factors = [noise.factor() for noise in [Noise(0.2, "a")] for _ in range(20_000)]
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.01)
    again = Noise(0.2, "a")
    assert [again.factor() for _ in range(100)] == factors[:100]
    assert Noise(0.0, "a").factor() == 1.0


def test_a_step_waits_for_the_kv_of_those_who_join() -> None:
    bench = Bench(handover=Handover(bytes_per_s=1e6, latency_s=0.001, layer_token_bytes=10.0))
    bench.prefill(HALVES)
    assert bench.next().ended_s == pytest.approx(0.4)  # the KV arrives 1 ms + 300 * 10 / 1e6 s later
    bench.executor.launch(Plan(HALVES, decode=DecodeBatch(("chat", "long"))))
    assert bench.next().ended_s == pytest.approx(0.4 + 0.004 + 0.02)
    bench.executor.launch(Plan(HALVES, decode=DecodeBatch(("chat", "long"))))
    assert bench.next().ended_s == pytest.approx(0.424 + 0.02)


def test_shares_of_the_lanes_over_time() -> None:
    bench = Bench()
    bench.prefill(HALVES)
    bench.decode(HALVES)
    bench.next()
    bench.next()
    (share,) = bench.shares.shares()
    assert share.decode == pytest.approx(0.025 * 1 / 4)
    assert share.prefill == pytest.approx((0.025 + 0.4 - 0.025 / 1.1) * 3 / 4)


def test_buckets_double_when_they_do_not_suffice() -> None:
    shares = LaneShares(2, 1.0)
    shares.add(0.0, 1200.0, 1, 0, 0)
    shares.add(1200.0, 1500.0, 0, 2, 0)
    taken = shares.shares()
    assert len(taken) <= 120
    assert taken[0].end_s == 16.0
    assert all(share.decode == 0.5 for share in taken if share.end_s <= 1200)
    assert sum(share.prefill for share in taken) * 16.0 == pytest.approx(300.0)
