"""The proofs of KV tiers: that they say what is wrong, and small ones of each kind."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from tools.kv_proof import tiny_model
from tools.kv_proof.conversations import Conversation, Turn, conversations, rounds
from tools.kv_proof.crash import LEAST_HIT, Life, crash, tiny
from tools.kv_proof.records import Records, verify
from tools.kv_proof.reference import TIE, Expected, Match, Reference, match
from tools.kv_proof.replay import Diverged, Recorder, Replay
from tools.kv_proof.report import ended
from tools.kv_proof.text import compare, differences
from tools.kv_proof.text_runs import Answer, Bench, Case

from engine.core.virtual import World, request
from engine.kv.records import flip, key_of, payload_of
from tidelane.engine.http.tokenizer import Tokenizer
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import TokenNames, namespace
from tidelane.engine.kv.slot_file import FILE_NAME, SlotFile, SlotLayout
from tidelane.engine.model.loading import load
from tidelane.engine.scheduling.policies import policy
from tidelane.rpc.wire import ExecutionMode

NAMES = TokenNames(namespace("test"), 4)


def nothing_told(*_: object) -> None:
    """No progress is shown."""


# ---- orders and verdicts ---------------------------------------------------------------------------------------------


def test_each_turn_is_asked_once_and_after_those_before_it() -> None:
    talks = [Conversation(str(n), (Turn((n,), 1),) * (1 + n % 3)) for n in range(20)]
    drawn = list(rounds(talks, 4, seed=1))
    assert all(len({talk.name for talk, _ in each}) == len(each) <= 4 for each in drawn)
    asked = {talk.name: [turn for each in drawn for other, turn in each if other is talk] for talk in talks}
    assert asked == {talk.name: list(range(len(talk.turns))) for talk in talks}


def test_what_differs_is_told() -> None:
    ours = {"a": Answer((1, 2, 3), 16), "b": Answer((1, 2), 16), "c": Answer((5,), 0), "d": Answer((6,), 32)}
    theirs = {"a": Answer((1, 9, 3), 16), "b": Answer((1,), 16), "c": Answer((5,), 0), "d": Answer((6,), 16)}
    assert differences(ours, theirs) == [
        "a: the texts differ from token 1 of 3 on",
        "b: the texts differ from token 1 of 1 on",
        "d: 32 tokens were found, and 16 by the other",
    ]


@pytest.mark.parametrize(
    ("got", "found"),
    [
        ((), Match(0, tied=False, wrong=False)),
        ((7, 8), Match(2, tied=False, wrong=False)),
        ((7, 9, 9), Match(1, tied=True, wrong=False)),
        ((7, 8, 8), Match(2, tied=False, wrong=True)),
        ((7, 8, 9, 1), Match(3, tied=False, wrong=True)),
    ],
)
def test_only_a_near_tie_may_fall_otherwise(got: tuple[int, ...], found: Match) -> None:
    assert match(got, Expected((7, 8, 9), (1.0, TIE / 2, 2 * TIE))) == found


def test_a_record_that_is_not_whole_is_found_from_outside(tmp_path: Path) -> None:
    layout = SlotLayout(5000, 4)
    slots, _ = SlotFile.open(tmp_path, namespace=b"n" * 16, payload_bytes=5000, capacity_bytes=layout.file_bytes)
    for slot in (0, 1, 3):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 5000))
    slots.close()
    file = tmp_path / FILE_NAME
    assert verify(file, 5000) == Records(frozenset(key_of(slot)[:16] for slot in (0, 1, 3)), frozenset())
    flip(file, layout.offset(1) + 4096 + 4999)
    flip(file, layout.offset(3) + 60)  # of the key: no header any more
    assert verify(file, 5000) == Records(frozenset({key_of(0)[:16]}), frozenset({1}))


def test_a_fault_is_told_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    life = Life(0.5, 7, 3, 1, 10, 10, 8, 0, 0, 60, 0)
    assert ended(["crash", "--json", str(out)], out, {"seed": 0}, [life], ["8 of 10 committed blocks were hit"]) == 1
    assert capsys.readouterr().out == "NOT AS IT MUST BE: 8 of 10 committed blocks were hit\n"
    plain = json.loads(out.read_text())
    assert plain["command"] == "python -m tools.kv_proof crash"
    assert (plain["results"][0]["hit"], plain["faults"]) == (8, ["8 of 10 committed blocks were hit"])
    assert ended([], None, {}, [life], []) == 0


# ---- launching again -------------------------------------------------------------------------------------------------


def launches(here: World) -> list[tuple[object, ...]]:
    return [(plan.decode, plan.prefill, plan.partition, plan.fused) for _, plan in here.executor.launched]


@pytest.mark.parametrize("name", ["lanes", "mixed"])
def test_another_engine_with_more_room_repeats_all_launches(name: str) -> None:
    recorder = Recorder(policy(name))
    tight = World(policies={"Lanes": recorder}, blocks=22, host_slots=60, names=NAMES)
    asked = [request(f"r{n}", 20 + n, 12, first=100 * n, arrival_s=n / 10) for n in range(6)]
    tight.submit(*asked)
    tight.run()
    assert tight.ledger.preemptions > 0
    wide = World(policies={"Lanes": Replay(recorder.steps)}, blocks=200, names=NAMES)
    wide.executor.stall_s = 0.3  # what is in flight together ends in another order
    wide.submit(*asked)
    wide.run()
    assert launches(wide) == launches(tight)
    assert [wide.tokens(each.id) for each in asked] == [tight.tokens(each.id) for each in asked]


def test_an_engine_that_finds_something_else_says_so() -> None:
    recorder = Recorder(policy("mixed"))
    first = World(policies={"Lanes": recorder}, names=NAMES)
    first.submit(request("one", 20, 2))
    first.run()
    other = World(policies={"Lanes": Replay(recorder.steps)}, names=NAMES)
    other.submit(request("one", 21, 2))
    with pytest.raises(Diverged, match=r"launch 2 of 2 cannot be repeated"):
        other.run()


# ---- small proofs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tiny_model.save(tmp_path_factory.mktemp("tiny"), seed=0)
    loaded = load(folder, "float32", None, torch.device("cpu"))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    talks = conversations(12, tokenizer_of(folder), seed=0)
    return Bench(loaded, cores, talks, tmp_path_factory.mktemp("kv"), seed=0)


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, lambda: datetime.now(tz=UTC))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ExecutionMode.MIXED_BATCH, ExecutionMode.LANES])
@pytest.mark.parametrize("at_once", [1, 3])
def test_text_is_the_same_wherever_kv_was_meanwhile(bench: Bench, mode: ExecutionMode, at_once: int) -> None:
    compared = compare(bench, Case(mode, at_once), nothing_told)
    assert compared.faults == ()
    assert compared.tokens > 400
    assert min(compared.from_host, compared.from_disk) > 0


@pytest.mark.slow
def test_a_wrong_byte_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    load_right, seen = HostMemory.load, 0

    def load_wrong(host: HostMemory, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int], layer: int) -> None:
        nonlocal seen
        load_right(host, pool, blocks, slots, layer)
        seen += 1
        if seen == 40:
            pool.keys[layer][16 * blocks[0], 0, 0] += 1.0

    monkeypatch.setattr(HostMemory, "load", load_wrong)
    (fault,) = compare(bench, Case(ExecutionMode.MIXED_BATCH, 1), nothing_told).faults
    assert "the canary: " in fault


@pytest.mark.slow
async def test_what_was_committed_before_a_kill_comes_back_right(tmp_path: Path) -> None:
    model, loaded = tiny(tmp_path / "model", seed=1)
    with Reference(loaded, sorted(os.sched_getaffinity(0)), model.banned) as reference:
        told = await crash(model, reference, tmp_path, kills=4, seed=1, tell=nothing_told)
    assert told.faults == []
    assert len(told.lives) == 4
    assert told.committed > 40
    assert told.kept == told.committed
    assert told.hit >= LEAST_HIT * told.committed
    assert sum(life.tokens for life in told.lives) > 200
