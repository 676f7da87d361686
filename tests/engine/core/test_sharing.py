"""Prompts that begin alike compute and hold their common blocks once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidelane.engine.channel import Tokens
from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import prefill_work
from tidelane.engine.kv.keys import Key, TokenNames, namespace
from tidelane.engine.kv.retention import IDLE_TIMEOUT_S, Asker
from tidelane.engine.request import FinishReason, Request, Sampling, ServiceTier
from tidelane.engine.scheduling.plan import Plan, PrefillSlice
from tidelane.engine.sequence import Sequence
from tidelane.engine.waiting import DISK_PATIENCE_S, TRIED_ANYWAY

from .virtual import World, request

NAMES = TokenNames(namespace("test"), 4)


def world(**options: object) -> World:
    return World(names=NAMES, **options)  # type: ignore[arg-type]


def cached(world: World, name: str) -> list[int]:
    """What each message about a request says of it: of interest is the first."""
    return [m.cached_tokens for m in world.desk.sent if isinstance(m, Tokens) and m.request_id == name]


def computed(world: World, name: str) -> int:
    """Tokens of its prompt that were launched."""
    return sum(
        span.tokens
        for _, plan in world.executor.launched
        if plan.prefill is not None and plan.prefill.first_layer == 0
        for span in plan.prefill.spans
        if span.id == name
    )


def next_turn(world: World, before: Request, name: str, tokens: int) -> Request:
    """The conversation so far, and so many tokens more."""
    history = (*before.prompt, *world.tokens(before.id))
    return replace(before, id=name, prompt=(*history, *range(500, 500 + tokens)))


@pytest.mark.parametrize("policy", ["Lanes", "Auto", "ChunkedPrefill", "MixedBatch", "StaticLanes"])
def test_a_conversation_does_not_pay_for_its_history_again(policy: str) -> None:
    here = world(policy=policy)
    first = request("first", 22, 9)
    here.submit(first)
    here.run()
    second = next_turn(here, first, "second", 3)
    here.submit(second)
    here.run()
    # 31 tokens, of which the last was never computed: 7 whole blocks.
    assert cached(here, "second")[0] == 28
    assert computed(here, "second") == len(second.prompt) - 28
    assert cached(here, "first") == [0] * 9
    assert cached(here, "second")[1:] == [0] * 8


def test_the_last_token_is_always_computed() -> None:
    here = world()
    for name in ("one", "same"):
        here.submit(request(name, 16, 2))
        here.run()
    assert cached(here, "same")[0] == 12


def test_who_waits_finds_what_was_computed_meanwhile() -> None:
    here = world(policy="ChunkedPrefill")  # 16 tokens at a time
    here.submit(request("one", 40, 1), request("other", 40, 1, arrival_s=0.1))
    here.run()
    # The third pass has room for both: 8 tokens of each.
    assert (computed(here, "one"), computed(here, "other")) == (40, 8)


def test_common_blocks_are_held_once() -> None:
    here = world(blocks=20, policy="ChunkedPrefill")
    here.submit(request("first", 44, 1))
    here.run()
    # Each would need 13 blocks of its own; together they have 11 in common.
    here.submit(*(replace(request(f"r{n}", 44, 4), prompt=(*range(44), n)) for n in range(4)))
    most = 0
    while here.advance():
        most = max(most, here.ledger.running)
    assert most == 4
    assert here.ledger.preemptions == 0


def test_who_lost_its_place_finds_its_blocks_again() -> None:
    here = world(blocks=12, policy="MixedBatch")
    here.submit(request("stays", 20, 12), request("yields", 16, 12, arrival_s=1.0, first=100))
    here.run()
    assert here.ledger.preemptions > 0
    assert {name: here.endings(name) for name in ("stays", "yields")} == {
        "stays": [FinishReason.LENGTH],
        "yields": [FinishReason.LENGTH],
    }


def test_who_is_found_but_for_one_token_prefills_it() -> None:
    """By its numbers it looks like one that decodes: a step would take it, too, while its prefill is on the way."""
    here = world()
    here.submit(request("yields", 16, 12))
    here.turn()
    assert here.executor.next_end_s is not None
    here.clock.now_s = here.executor.next_end_s
    ledger = here.ledger
    for event in here.executor.poll():  # its first token; nothing is planned after it
        ledger.hear(event, here.clock.now_s)
    assert [step.context for step in ledger.state().decoding] == [16]
    whole = ledger.state().table.whole
    ledger.apply(Plan(whole, preempt=("yields",)), here.clock.now_s)
    ledger.apply(Plan(whole, admit=("yields",)), here.clock.now_s)
    state = ledger.state()
    assert [(job.tokens, job.computed) for job in state.prefilling] == [(17, 16)]
    assert state.decoding == ()


def test_another_salt_finds_nothing() -> None:
    here = world()
    for name, salt in (("mine", "a"), ("yours", "b"), ("mine again", "a")):
        here.submit(request(name, 20, 2, salt=salt))
        here.run()
    assert [cached(here, name)[0] for name in ("mine", "yours", "mine again")] == [0, 0, 16]


def test_a_prompt_to_be_scored_is_computed_whole() -> None:
    here = world()
    here.submit(request("first", 20, 2))
    here.run()
    scored = replace(request("scored", 20, 2), sampling=Sampling(seed=0, temperature=0.0, prompt_logprobs=0))
    here.submit(scored)
    here.run()
    assert cached(here, "scored")[0] == 0
    assert computed(here, "scored") == 20


def test_what_came_out_wrong_is_not_used_again() -> None:
    here = world()
    here.submit(request("first", 20, 1))
    here.run()
    wrong = request("wrong", 24, 8)
    here.submit(wrong)
    while "wrong" not in here.ledger.sequences or not _decodes(here.ledger.sequences["wrong"]):
        assert here.advance()
    here.executor.broken.add("wrong")
    here.run()
    assert here.endings("wrong") == [FinishReason.ERROR]
    here.submit(request("next", 24, 1))
    here.run()
    assert cached(here, "next")[0] == 0
    assert here.ledger.pool.free == here.ledger.pool.total


def _decodes(sequence: Sequence) -> bool:
    return sequence.output_tokens > 1


def test_an_aborted_prompt_leaves_what_it_has_computed() -> None:
    here = world(policy="ChunkedPrefill")
    here.submit(request("gone", 40, 4))
    here.advance()
    here.abort("gone")  # its second pass is under way
    here.run()
    here.submit(request("next", 40, 1))
    here.run()
    assert cached(here, "next")[0] == 32
    assert here.ledger.pool.free == here.ledger.pool.total


def crowd_out(here: World, blocks: int) -> None:
    """Others use all of the device and host memory."""
    here.submit(request("crowd", 4 * blocks, 1, first=300))
    here.run()


@pytest.mark.parametrize("policy", ["Lanes", "ChunkedPrefill", "MixedBatch"])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside decode"])
@pytest.mark.parametrize("from_below", [False, True], ids=["found on the device", "found in host memory"])
def test_the_time_that_prefill_waits_for_host_memory_is_not_taken_for_its_own(
    policy: str, company: bool, from_below: bool
) -> None:
    here = world(policy=policy, blocks=30, host_slots=60)
    first = request("first", 22, 3)
    here.submit(first)
    here.run()
    if from_below:
        crowd_out(here, 29)
    if company:
        here.submit(request("steady", 8, 60, first=700))
        while not here.ledger.state().decoding:
            assert here.advance()
    before, loaded = here.ledger.estimates, here.ledger.pool.loaded_blocks
    here.executor.stall_s = 0.5
    here.submit(next_turn(here, first, "second", 3))
    while "second" not in here.finished():
        assert here.advance()
    assert (here.ledger.pool.loaded_blocks > loaded) == from_below
    after, work = here.ledger.estimates, prefill_work(((24, 28),))
    slower = [
        after.seconds(phase, 4, work) / before.seconds(phase, 4, work) > 1.001 for phase in (Phase.PREFILL, Phase.FUSED)
    ]
    if from_below:
        assert slower == [False, False]
        assert after.guards == before.guards
    elif not (company and policy == "Lanes"):  # beside decode lanes teach contention, not times
        assert any(slower)


def test_what_is_on_the_disk_alone_is_fetched_while_its_prompt_waits_unseen() -> None:
    here = world(blocks=10, host_slots=9, disk_slots=40)
    first = request("first", 22, 3)
    here.submit(first)
    here.run()
    crowd_out(here, 9)
    assert here.ledger.pool.host.evictions >= 6
    second = next_turn(here, first, "second", 3)
    here.submit(second)
    here.turn()
    assert here.ledger.waiting == 1
    assert here.ledger.state().queued == ()
    here.run()
    # The fifth of six was not there any more, so that the sixth is of no use.
    assert cached(here, "second")[0] == 16
    assert computed(here, "second") == len(second.prompt) - 16
    assert here.ledger.pool.fetched_blocks == 5


def test_what_is_fetched_for_one_does_not_push_out_what_another_waits_for() -> None:
    here = world(blocks=10, host_slots=15, disk_slots=40)
    first, gone = request("first", 22, 3, first=100), request("gone", 22, 3)
    for each in (gone, first):
        here.submit(each)
        here.run()
    crowd_out(here, 9)
    assert here.ledger.pool.host.evictions == 6
    # Both come in the same turn of the loop. In host memory all of `first` has been unused for longest.
    here.submit(next_turn(here, first, "on", 3), next_turn(here, gone, "back", 3))
    here.run()
    assert cached(here, "on")[0] == 24
    assert here.ledger.pool.fetched_blocks >= 4


def test_a_slow_disk_is_asked_only_now_and_then() -> None:
    """Of what is computed sooner, so that it is noticed when the disk is fast again."""
    here = world(blocks=10, host_slots=9, disk_slots=400, fetch_s=lambda blocks: 10.0 * blocks)
    first = request("first", 22, 3)
    here.submit(first)
    here.run()
    fetched = []
    for number in range(2 * TRIED_ANYWAY):
        here.submit(request("crowd", 36, 1, first=300 + 100 * number))
        here.run()
        before = here.ledger.pool.fetched_blocks
        here.submit(next_turn(here, first, f"again {number}", 3))
        here.run()
        fetched.append(here.ledger.pool.fetched_blocks > before)
    assert [number for number, was in enumerate(fetched, start=1) if was] == [TRIED_ANYWAY, 2 * TRIED_ANYWAY]


def test_who_waits_for_a_disk_that_does_not_answer_is_computed_in_the_end() -> None:
    here = world(blocks=10, host_slots=9, disk_slots=40)
    first = request("first", 22, 3)
    here.submit(first)
    here.run()
    crowd_out(here, 9)
    here.mover.hangs = True
    here.submit(replace(next_turn(here, first, "second", 3), arrival_s=here.clock.now_s))
    here.turn()
    assert here.ledger.state().queued == ()
    here.clock.now_s += DISK_PATIENCE_S + 0.1
    here.turn()
    assert cached(here, "second") == []
    while here.executor.next_end_s is not None:
        here.advance()
    assert cached(here, "second")[0] == 0
    here.mover.hangs = False
    here.run()
    assert here.ledger.pool.free == here.ledger.pool.total


def test_a_prompt_aborted_while_the_disk_works_for_it_leaves_nothing_behind() -> None:
    here = world(blocks=10, host_slots=9, disk_slots=40)
    first = request("first", 22, 3)
    here.submit(first)
    here.run()
    crowd_out(here, 9)
    here.submit(next_turn(here, first, "second", 3))
    here.turn()
    here.abort("second")
    here.run()
    assert here.ledger.empty
    assert here.ledger.pool.still
    assert here.ledger.pool.free == here.ledger.pool.total


def on_device(here: World, asked: Request) -> int:
    """How many blocks of its prompt."""
    keys: list[Key] = []
    NAMES.extend(keys, asked, list(asked.prompt), len(asked.prompt) // 4)
    return sum(key in here.ledger.pool.device for key in keys)


@pytest.mark.parametrize(
    ("tiers", "idle_s", "left"),
    [
        ("default default default", 0.0, [0, 4, 4]),
        ("default default flex", 0.0, [4, 4, 0]),
        ("priority priority default", 0.0, [4, 4, 0]),
        ("priority default default", 0.0, [4, 0, 4]),
        ("priority default default", 2 * IDLE_TIMEOUT_S, [0, 4, 4]),
    ],
)
def test_room_is_made_by_service_tier_of_what_has_not_timed_out(tiers: str, idle_s: float, left: list[int]) -> None:
    here = world(blocks=16)
    asked = [request(tier, 16, 1, first=1000 * at, tier=ServiceTier(tier)) for at, tier in enumerate(tiers.split(), 1)]
    asked = [replace(each, id=f"{each.id} {at}") for at, each in enumerate(asked)]
    for each in asked:
        here.submit(each)
        here.run()
        here.clock.now_s += idle_s if each is asked[0] else 0.0
    here.submit(request("crowd", 28, 1, first=9000))
    here.run()
    assert here.ledger.pool.device.evictions == 4
    assert [on_device(here, each) for each in asked] == left


def test_who_comes_back_after_losing_its_place_is_of_the_same_turn() -> None:
    here = world(blocks=12)
    here.submit(request("first", 20, 20, arrival_s=0.1), request("late", 20, 24, first=100, arrival_s=0.2))
    here.turn()
    late = here.ledger.sequences["late"]
    assert late.asker == Asker(1, 1)
    here.run()
    assert here.ledger.preemptions == 1
    assert late.asker == Asker(1, 1)
    here.submit(request("on", 44, 1, first=100), request("again", 20, 1, first=100))
    here.turn()
    assert [here.ledger.sequences[name].asker for name in ("on", "again")] == [Asker(2, 1), Asker(1, 1)]


@pytest.mark.parametrize("policy", ["Lanes", "MixedBatch", "ChunkedPrefill"])
@pytest.mark.parametrize("late", [False, True])
def test_who_waits_for_a_load_that_is_lost_is_computed_again_and_who_is_with_him_goes_on(
    policy: str, late: bool
) -> None:
    """`late`: the cache hears of it only after the launch has failed."""

    def waits_in_vain(prefill: PrefillSlice | None) -> bool:
        spans = () if prefill is None else prefill.spans
        return any(each.lost for span in spans for each in here.ledger.sequences[span.id].holding.arrivals)

    here = world(blocks=24, host_slots=60, policy=policy, fail=waits_in_vain)
    first = request("first", 22, 3)
    here.submit(first)
    here.run()
    crowd_out(here, 23)
    here.submit(request("steady", 8, 30, first=700))
    while not here.ledger.state().decoding:
        assert here.advance()
    here.mover.loses, here.mover.hangs = True, late
    here.submit(next_turn(here, first, "second", 3), request("with him", 9, 4, first=800))
    for _ in range(60):
        here.advance()
    here.mover.hangs = False
    here.run()
    assert {name: here.endings(name) for name in ("second", "with him", "steady")} == {
        name: [FinishReason.LENGTH] for name in ("second", "with him", "steady")
    }
    assert here.ledger.pool.loaded_blocks == 0
    # Found as it came, and not again until it has been computed.
    assert cached(here, "second")[0] == 24
    assert computed(here, "second") >= 27
    assert here.ledger.pool.free == here.ledger.pool.total
    here.mover.loses = False
    here.submit(next_turn(here, first, "third", 4))
    here.run()
    assert cached(here, "third")[0] == (12 if late else 28)  # a slot that is still read takes nothing new
