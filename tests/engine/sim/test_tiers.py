"""KV below a virtual device, worked out by hand."""

from __future__ import annotations

import pytest

from tidelane.engine.bench.traffic import Arrival as Coming
from tidelane.engine.bench.traffic import Traffic
from tidelane.engine.estimation.shapes import kv_bytes_per_token, model_shape
from tidelane.engine.kv.moves import Arrival, Fetch, Load, Spill, Store
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.sim.machine import DoesNotFit, with_tiers
from tidelane.engine.sim.tiers import NO_TIERS, Tiers, TierSizes, VirtualMover
from tidelane.engine.sim.world import Replay, Settings, replay

from .machines import SLO, machine, traffic

POLICIES = ("mixed", "chunked", "static", "lanes", "auto")


def load(number: int, blocks: int) -> Load:
    return Load(number, (b"key",) * blocks, (0,) * blocks, (0,) * blocks, Arrival())


def test_copies_of_one_kind_follow_each_other_and_those_of_two_do_not() -> None:
    clock = VirtualClock()
    mover = VirtualMover(clock, Tiers(100, 100, host_block_s=0.1, disk_block_s=1.0))
    first, second = load(1, 3), load(2, 2)
    spill, fetch = Spill(3, b"a", b"", 0, 0), Fetch(4, b"b", b"", 1, 1)
    mover.start([first, second, spill, fetch])
    assert mover.there_s([first.arrival], 0.5) == pytest.approx(0.15)
    assert mover.there_s([first.arrival, second.arrival], 0.5) == pytest.approx(0.4)
    assert [mover.next_end_s, mover.next_fetch_s] == pytest.approx([0.3, 1.0])
    clock.now_s = 0.4
    assert mover.poll() == [(first, True)]
    late = Store(5, b"c", 0, 2)
    mover.start([late])
    clock.now_s = 2.0
    assert mover.poll() == [(second, True), (late, True), (spill, True), (fetch, True)]
    assert (mover.next_end_s, mover.next_fetch_s) == (None, None)
    assert mover.there_s([first.arrival], 1.0) == 0.0


def conversation(tiers: Tiers) -> Replay:
    """A prompt of 1,100 tokens; another that takes its place on the device; the first again, with another end."""
    arrivals = ((0.0, (1, 2, 3)), (5.0, (7, 8, 9)), (10.0, (1, 2, 4)))
    sent = Traffic(tuple(Coming(at_s, 1100, 2, hash_ids=hashes) for at_s, hashes in arrivals), 11.0)
    return replay(sent, machine(blocks=69, tiers=tiers), lambda: policy("mixed", "own"), Settings(SLO))


def ttft_s(done: Replay) -> list[float]:
    return [answer.timeline.ttft_s for answer in done.answers if answer.timeline]


def test_what_has_left_the_device_is_computed_again_where_there_is_nothing_below() -> None:
    done = conversation(NO_TIERS)
    assert ttft_s(done) == pytest.approx([1.1, 1.1, 1.1])
    assert (done.found.prompt_tokens, done.found.cached_tokens) == (3300, 0)


@pytest.mark.parametrize(("block_s", "expected_s"), [(0.001, 0.076), (0.002, 64 * 0.002 + 0.0076)])
def test_a_load_takes_its_time_or_that_of_what_is_computed_meanwhile(block_s: float, expected_s: float) -> None:
    done = conversation(Tiers(200, 0, host_block_s=block_s, disk_block_s=1.0))
    assert ttft_s(done) == pytest.approx([1.1, 1.1, expected_s])  # 76 tokens; the tenth of a pass after the last layer
    assert (done.found.cached_tokens, done.found.loaded_tokens) == (1024, 1024)


def test_what_is_on_the_disk_alone_is_fetched_first() -> None:
    done = conversation(Tiers(69, 200, host_block_s=0.002, disk_block_s=0.001))
    fetched = done.found.fetched_tokens // 16
    assert fetched == 63
    assert ttft_s(done)[2] == pytest.approx(63 * 0.001 + 64 * 0.002 + 0.0076)
    assert done.found.cached_tokens == 1024


def test_what_is_computed_sooner_than_fetched_is_not_fetched() -> None:
    """1,024 tokens take 1.024 s to compute."""
    for block_s, fetched in ((0.0159, True), (0.0161, False)):  # a block of 16 of them takes 0.016 s
        done = conversation(Tiers(69, 200, host_block_s=0.0001, disk_block_s=block_s))
        assert bool(done.found.fetched_tokens) is fetched


def rhythm(*, prefetch: bool) -> Replay:
    """The same prompt every 10 s, and between them one that takes its place on the device and in host memory."""
    arrivals = [(10.0 * turn + late_s, hashes) for turn in range(40) for late_s, hashes in (
        (0.0, (1, 2, 3)), (5.0, (100 + 3 * turn, 101 + 3 * turn, 102 + 3 * turn)),
    )]  # fmt: skip
    sent = Traffic(tuple(Coming(at_s, 1100, 2, hash_ids=hashes) for at_s, hashes in arrivals), 400.0)
    tiers = Tiers(69, 4000, host_block_s=0.002, disk_block_s=0.001, prefetch=prefetch)
    return replay(sent, machine(blocks=69, tiers=tiers), lambda: policy("mixed", "own"), Settings(SLO))


def test_who_comes_in_a_rhythm_waits_for_no_copy() -> None:
    without, done = rhythm(prefetch=False), rhythm(prefetch=True)
    assert ttft_s(without)[78] == pytest.approx(67 * 0.001 + 68 * 0.002 + 0.0012)
    assert ttft_s(done)[78] == pytest.approx(0.012)  # 12 tokens are left to compute
    assert all(now_s <= before_s for now_s, before_s in zip(ttft_s(done), ttft_s(without), strict=True))
    assert done.found.cached_tokens == without.found.cached_tokens == 39 * 1088
    ahead = done.found.fetched_ahead
    assert ahead.useful > 6 * 1088
    assert ahead.tokens == ahead.useful + ahead.wasted
    again = rhythm(prefetch=True)
    assert (again.answers, again.found) == (done.answers, done.found)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_whatever_moves(name: str) -> None:
    split = machine().table.splits[0]
    for tiers in (Tiers(30, 0, 0.001, 0.1), Tiers(20, 400, 0.01, 0.05)):
        done = replay(
            traffic(100, rate=20.0),
            machine(blocks=50, tiers=tiers),
            lambda: policy(name, "ours", split=split if name == "static" else None),
            Settings(SLO),
        )
        assert all(answer.timeline is not None for answer in done.answers)
        assert done.found.loaded_tokens > 0


def test_sizes_become_blocks_of_the_model() -> None:
    shape = model_shape("llama-3.1-8b")
    block = kv_bytes_per_token(shape) * 16
    told = with_tiers(machine(), shape, TierSizes(10.5 * block, 3 * block, 2 * block, block))
    assert told.tiers == Tiers(10, 3, 0.5, 1.0)
    with pytest.raises(DoesNotFit, match="no room for a block"):
        with_tiers(machine(), shape, TierSizes(0.5 * block))
