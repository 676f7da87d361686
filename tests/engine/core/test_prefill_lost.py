"""What the ledger makes of the end of the process that prefills; the process is real in tests/engine/handover."""

from __future__ import annotations

from dataclasses import replace

from tidelane.engine.channel import Tokens
from tidelane.engine.execution.executor import PrefillLost
from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.ledger import MOST_PREFILLS_LOST
from tidelane.engine.request import FinishReason, TokenLogprob
from tidelane.engine.scheduling.policies import apart_policies

from .virtual import World, request

SPLIT = Partition(2, 2)


def two_processes(blocks: int = 256) -> World:
    return World(
        policy="Disaggregated",
        policies=dict(apart_policies(SPLIT)),
        table=PartitionTable(4, (SPLIT,)),
        blocks=blocks,
    )


def decoding(world: World, name: str, new: int) -> None:
    world.submit(request(name, new=new))
    while not world.tokens(name):
        world.advance()


def prefilling(world: World, name: str, prompt: int) -> None:
    world.submit(request(name, prompt=prompt, new=3, arrival_s=world.clock.now_s))
    world.turn()
    while world.ledger.flight.prefill is None:
        world.advance()


def test_its_prompts_wait_and_decode_goes_on() -> None:
    world = two_processes()
    decoding(world, "stream", new=60)
    prefilling(world, "prompt", prompt=400)
    world.executor.end_prefill()
    before = len(world.tokens("stream"))
    for _ in range(20):
        world.advance()
    assert len(world.tokens("stream")) >= before + 20
    assert world.ledger.flight.prefill is None
    assert (world.ledger.running, world.ledger.waiting) == (1, 1)
    held = len(world.ledger.sequences["stream"].blocks)
    assert world.ledger.pool.free == world.ledger.pool.total - held
    world.executor.bring_prefill_back()
    world.run()
    assert world.tokens("prompt") == [1400, 1401, 1402]
    assert world.endings("stream") == world.endings("prompt") == [FinishReason.LENGTH]
    assert world.ledger.preemptions == 0
    assert world.ledger.pool.free == world.ledger.pool.total


def test_prompts_done_in_part_start_anew() -> None:
    world = two_processes(blocks=1024)
    world.submit(request("long", prompt=3000, new=1))
    while not (world.ledger.flight.idle is False and world.ledger.sequences["long"].computed):
        world.advance()
    world.executor.end_prefill()
    world.turn()
    assert world.ledger.sequences["long"].computed == 0
    world.executor.bring_prefill_back()
    first_after = len(world.executor.launched)
    world.run()
    again = [plan.prefill.spans[0] for _, plan in world.executor.launched[first_after:] if plan.prefill]
    assert (again[0].start, again[-1].stop) == (0, 3000)
    assert world.tokens("long") == [4000]


def test_a_prompt_that_it_always_ends_at_gets_one_error() -> None:
    world = two_processes()
    decoding(world, "stream", new=200)
    prefilling(world, "poison", prompt=400)
    for _ in range(MOST_PREFILLS_LOST):
        assert world.endings("poison") == []
        while world.ledger.flight.prefill is None:
            world.advance()
        world.executor.end_prefill()
        world.executor.bring_prefill_back()
        world.turn()
    assert world.endings("poison") == [FinishReason.ERROR]
    (last,) = [m for m in world.desk.sent if isinstance(m, Tokens) and m.request_id == "poison"]
    assert last.error == "the process that prefills ended 3 times while it was at this prompt"
    world.run()
    assert world.endings("stream") == [FinishReason.LENGTH]
    assert world.ledger.pool.free == world.ledger.pool.total


def test_a_request_aborted_while_it_was_computed_is_let_go() -> None:
    world = two_processes()
    prefilling(world, "gone", prompt=400)
    world.abort("gone")
    world.turn()
    assert "gone" in world.ledger.sequences
    world.executor.end_prefill()
    world.turn()
    assert world.ledger.empty
    assert world.ledger.pool.free == world.ledger.pool.total
    assert world.endings("gone") == []


def test_not_to_come_back_is_to_stand_still() -> None:
    world = two_processes()
    decoding(world, "stream", new=1000)
    world.executor.end_prefill()
    world.turn()
    began_s = world.clock.now_s
    for _ in range(10):
        world.advance()
    assert world.ledger.still_for_s(world.clock.now_s) == world.clock.now_s - began_s
    world.executor.bring_prefill_back()
    world.turn()
    assert world.ledger.still_for_s(world.clock.now_s) < world.clock.now_s - began_s


def test_what_was_reported_of_half_a_prompt_is_not_reported_twice() -> None:
    world = two_processes(blocks=1024)
    scored = request("scored", prompt=3000, new=1)
    world.submit(replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0)))
    while not (world.ledger.flight.idle is False and world.ledger.sequences["scored"].computed):
        world.advance()
    sequence = world.ledger.sequences["scored"]
    sequence.prompt_logprobs.append(TokenLogprob(1, -0.5))
    world.ledger.hear(PrefillLost(world.ledger.flight.prefill), world.clock.now_s)
    assert sequence.prompt_logprobs == []
