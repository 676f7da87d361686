"""Requests larger than the pool, in virtual time, under every policy: who computes when, and what is held meanwhile."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.channel import RefusalReason, Refused, Tokens
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.request import FinishReason, Request
from tidelane.engine.scheduling.plan import Objective, PrefillSlice
from tidelane.engine.slo import Slo

from .virtual import World, request

POLICIES = ("Lanes", "Auto", "ChunkedPrefill", "ChunkedByBudget", "MixedBatch", "StaticLanes")
BLOCK = 4
BLOCKS = 40
RUN = StreamRun.at_end_of(BLOCKS)
HOST_SLOTS = 200
PROMPT = 400  # of a pool of 160 tokens, and with the answer of host memory's 800


def world(policy: str = "Lanes", **options: object) -> World:
    settled: dict[str, object] = {
        "blocks": BLOCKS,
        "block_tokens": BLOCK,
        "host_slots": HOST_SLOTS,
        "stream_run": RUN,
        "names": TokenNames(b"model", BLOCK),
    }
    return World(policy=policy, **{**settled, **options})  # type: ignore[arg-type]


def all_is_given_back(here: World) -> None:
    cache = here.ledger.pool
    assert here.ledger.empty
    assert here.ledger.waiting == here.ledger.running == 0
    assert (cache.free, cache.device.kept, cache.host.pinned) == (BLOCKS, 0, 0)
    named = len(cache.host._slots)
    assert cache.host.free + named == HOST_SLOTS


def passes(here: World, name: str) -> list[PrefillSlice]:
    """The slices launched of it, in order."""
    slices = [plan.prefill for _, plan in here.executor.launched if plan.prefill is not None]
    return [each for each in slices if each.spans[0].id == name]


def times_s(here: World, name: str) -> list[float]:
    sent = [each for each in here.desk.sent if isinstance(each, Tokens) and each.request_id == name and each.new]
    return [each.time_s for each in sent]


def test_the_run_is_a_small_part_of_the_pool_at_its_end() -> None:
    assert StreamRun(first=30, part_blocks=3, own_blocks=4) == RUN
    assert StreamRun.at_end_of(15) is None
    assert StreamRun.at_end_of(16) == StreamRun(12, 1, 2)
    large = StreamRun.at_end_of(100_000)
    assert large is not None
    assert (large.part_blocks, large.first + large.count) == (64, 100_000)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_larger_than_the_pool_is_answered(policy: str) -> None:
    here = world(policy)
    here.submit(request("long", prompt=PROMPT, new=30))
    here.run()
    assert here.tokens("long") == [1000 + PROMPT + at for at in range(30)]
    assert here.endings("long") == [FinishReason.LENGTH]
    first = next(each for each in here.desk.sent if isinstance(each, Tokens))
    assert first.cached_tokens == 0
    # Every token once, in passes of all layers that its run has room for.
    ends = [0]
    for each in passes(here, "long"):
        (span,) = each.spans
        assert span.start == ends[-1]
        assert span.tokens <= 12
        if each.last_layer == 6:
            ends.append(span.stop)
    assert ends[-1] == PROMPT + 29
    all_is_given_back(here)


def test_what_fits_beside_the_run_does_not_stream_and_what_never_fits_is_refused_with_the_numbers() -> None:
    here = world()
    here.submit(request("fits", prompt=116, new=4), request("streams", prompt=117, new=4))
    here.submit(request("all", prompt=796, new=4, first=7), request("never", prompt=797, new=4))
    here.turn()
    assert here.ledger.sequences["fits"].stream is None
    assert here.ledger.sequences["streams"].stream is not None
    (refusal,) = [each for each in here.desk.sent if isinstance(each, Refused)]
    assert refusal.request_id == "never"
    assert refusal.reason is RefusalReason.NEVER_FITS
    assert refusal.message == (
        "797 prompt tokens and 4 new ones can never fit: the KV cache holds 120 tokens on the device and 800 in host "
        "memory: ask for fewer, or give it more host memory (kvCache.hostMemory, --kv-host-memory)"
    )
    here.run()
    assert [here.endings(name) for name in ("fits", "streams", "all")] == [[FinishReason.LENGTH]] * 3
    all_is_given_back(here)


def test_without_host_memory_nothing_streams() -> None:
    here = world(host_slots=0, stream_run=None)
    here.submit(request("fits", prompt=156, new=4), request("never", prompt=157, new=4))
    here.run()
    assert here.endings("fits") == [FinishReason.LENGTH]
    assert here.endings("never") == [RefusalReason.NEVER_FITS]


def test_one_streams_at_a_time_and_the_others_wait_in_order_of_priority() -> None:
    here = world()
    here.submit(request("a", prompt=300), request("c", prompt=300, arrival_s=2.0), request("b", prompt=300))
    here.turn()
    assert (here.ledger.streams.running, here.ledger.streams.waiting, here.ledger.waiting) == (1, 2, 2)
    here.run()
    assert here.finished() == ["a", "b", "c"]
    all_is_given_back(here)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_decodes_keeps_to_its_target_and_the_stream_goes_on(policy: str) -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    here = world(policy, objective=Objective(slo))
    here.submit(request("short", prompt=8, new=100))
    for _ in range(10):
        here.advance()
    here.submit(request("long", prompt=PROMPT, new=40, first=50))
    here.run()
    gaps_s = [later - earlier for earlier, later in pairwise(times_s(here, "short"))]
    assert max(gaps_s) <= slo.tpot_s
    # It did not wait for the end of the other.
    assert times_s(here, "long")[0] < times_s(here, "short")[-1]
    all_is_given_back(here)


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_keep_coming_leave_the_stream_a_quarter_of_the_time_and_no_less(policy: str) -> None:
    here = world(policy)
    here.submit(request("long", prompt=PROMPT, new=2, first=90))
    number = 0
    for _ in range(4000):
        if here.ledger.waiting < 4:
            here.submit(request(f"short{number}", prompt=40, new=1, first=number * 100, arrival_s=here.clock.now_s))
            number += 1
        assert here.advance()
        if here.endings("long"):
            break
    assert here.endings("long") == [FinishReason.LENGTH]
    assert number > 10
    slices = [plan.prefill for _, plan in here.executor.launched if plan.prefill is not None]
    mine = [each.spans[0].id == "long" for each in slices]
    assert 0 < sum(mine) < len(mine)


def test_a_pass_that_fails_is_run_again_and_after_three_times_the_request_ends() -> None:
    fails = [0]

    def now_and_then(prefill: PrefillSlice | None) -> bool:
        if prefill is None or prefill.spans[0].start != 24:
            return False
        fails[0] += 1
        return fails[0] <= 2

    here = world(fail=now_and_then)
    here.submit(request("long", prompt=PROMPT, new=3))
    here.run()
    assert fails[0] >= 3
    assert here.tokens("long") == [1000 + PROMPT + at for at in range(3)]
    here = world(fail=lambda prefill: prefill is not None and prefill.spans[0].start == 24)
    here.submit(request("long", prompt=PROMPT, new=3), request("next", prompt=300, new=3, first=9, arrival_s=1.0))
    here.run()
    assert here.endings("long") == [FinishReason.ERROR]
    (error,) = [each.error for each in here.desk.sent if isinstance(each, Tokens) and each.request_id == "long"]
    assert error == "a pass failed 3 times, at last by made to fail"
    all_is_given_back(here)


def test_output_that_is_no_number_ends_it() -> None:
    here = world()
    here.submit(request("long", prompt=PROMPT, new=30))
    here.executor.broken.add("long")
    here.run()
    assert here.endings("long") == [FinishReason.ERROR]
    all_is_given_back(here)


def test_who_holds_blocks_of_the_run_is_not_disturbed_and_gives_them_no_names_any_more() -> None:
    here = world()
    # All of the pool is in use, or holds what earlier prompts left there, as the long one comes.
    here.submit(*(request(f"early{at}", prompt=70, new=30, first=100 * at) for at in range(2)))
    here.submit(request("left", prompt=12, new=1, first=900))
    for _ in range(12):
        here.advance()
    here.submit(request("long", prompt=PROMPT, new=3, first=5000))
    here.turn()
    assert here.ledger.streams.running == 0
    here.run()
    assert here.tokens("early0") == [1070 + at for at in range(30)]
    assert here.tokens("early1") == [1070 + at for at in range(30)]
    assert here.endings("long") == [FinishReason.LENGTH]
    all_is_given_back(here)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_ends_with_an_error_if_the_engine_gives_up(policy: str) -> None:
    here = world(policy)
    here.submit(request("long", prompt=PROMPT), request("next", prompt=300), request("short"))
    for _ in range(7):
        here.advance()
    here.ledger.fail_all("gone", here.clock.now_s)
    here.run()
    assert here.ledger.empty
    assert here.ledger.pool.device.kept == here.ledger.pool.host.pinned == 0


SOME = given(policy=st.sampled_from(POLICIES), seed=st.integers(0, 10_000), failing=st.booleans())


@settings(max_examples=12, deadline=None)
@SOME
def test_whatever_comes_goes_or_fails_nothing_is_left_held(policy: str, seed: int, failing: bool) -> None:
    anything_goes(policy, seed, failing=failing)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@SOME
def test_whatever_comes_goes_or_fails_nothing_is_left_held_often(policy: str, seed: int, failing: bool) -> None:
    anything_goes(policy, seed, failing=failing)


def anything_goes(policy: str, seed: int, *, failing: bool) -> None:
    chance = random.Random(seed)
    # One launch in so many fails: of streams no more than one in a row, as the tenth is never beside the eleventh.
    launches = [0]

    def fails(_: PrefillSlice | None) -> bool:
        launches[0] += 1
        return failing and launches[0] % 10 == 0

    here = world(policy, fail=fails)
    asked: dict[str, Request] = {}
    aborted = set()
    for number in range(14):
        long = chance.random() < 0.35
        one = request(
            f"r{number}",
            prompt=chance.randrange(121, 420) if long else chance.randrange(1, 60),
            new=chance.randrange(1, 20),
            first=chance.choice((0, 0, 1000 * number)),
            arrival_s=here.clock.now_s,
        )
        asked[one.id] = one
        here.submit(one)
        for _ in range(chance.randrange(6)):
            here.advance()
        if chance.random() < 0.3:
            gone = chance.choice(list(asked))
            aborted.add(gone)
            here.abort(gone)
    here.run()
    here.run()
    all_is_given_back(here)
    for name, one in asked.items():
        endings = here.endings(name)
        if name in aborted:
            assert len(endings) <= 1
        elif endings != [FinishReason.ERROR] or not failing:
            assert endings == [FinishReason.LENGTH]
            length = len(one.prompt)
            assert here.tokens(name) == [1000 + at for at in range(length, length + one.max_new_tokens)]
