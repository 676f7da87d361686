"""Greedy text equals transformers' generate() in float32, token for token, whatever the policy, split or moment.

Where the two best logits lie within 1e-4 of each other either may win, since summing in another order moves them that
much; such flips are counted and bounded, and the comparison of that sequence ends there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.channel import ToFront, Tokens
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.model.store import default_store, resolve
from tidelane.engine.request import FinishReason, Request, Sampling
from tidelane.engine.scheduling.plan import Objective
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode

from .models import FAMILIES, save

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 100, 150, 255, 256, 400, 700, 1200, 2000)
NEW_TOKENS = 8
TIE = 1e-4
# Those that an engine changes between while it runs.
LIVE_MODES = [mode for mode in ExecutionMode if mode is not ExecutionMode.DISAGGREGATED]
# Two cores named twice: the splits of a machine of four, 1|3, 2|2 and 3|1.
CORES = (0, 1, 0, 1)


@dataclass(frozen=True)
class Expected:
    prompt: tuple[int, ...]
    tokens: list[int]
    logits: list[torch.Tensor]


@dataclass(frozen=True)
class Oracle:
    loaded: LoadedModel
    answers: tuple[Expected, ...]


def expected_answers(folder: Path, vocab_size: int) -> tuple[Expected, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chance = random.Random(3)
    answers = []
    for length in LENGTHS:
        prompt = tuple(chance.randrange(3, vocab_size) for _ in range(length))
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,  # bans the end token: the engine is told to ignore it by a bias
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answers.append(Expected(prompt, out.sequences[0, length:].tolist(), [row[0] for row in out.logits]))
    return tuple(answers)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    loaded = load(folder, "float32", None, torch.device("cpu"))
    return Oracle(loaded, expected_answers(folder, loaded.facts.vocab_size))


@pytest.fixture(scope="module")
def builtin() -> Oracle:
    folder = resolve("builtin://smollm2-135m-instruct", default_store(), print)
    loaded = load(folder, "float32", None, torch.device("cpu"))
    return Oracle(loaded, expected_answers(folder, loaded.facts.vocab_size))


def requests(oracle: Oracle) -> Iterator[Request]:
    for number, expected in enumerate(oracle.answers):
        sampling = Sampling(
            seed=0, temperature=0.0, logit_bias=tuple((t, -1e9) for t in oracle.loaded.facts.stop_token_ids)
        )
        yield Request(f"r{number:02}", expected.prompt, NEW_TOKENS, sampling, arrival_s=float(number))


def compare(oracle: Oracle, answers: dict[str, list[int]]) -> int:
    """Number of flips at ties; fails on any other difference."""
    flips = 0
    for number, expected in enumerate(oracle.answers):
        got = answers[f"r{number:02}"]
        assert len(got) == NEW_TOKENS
        for position, (mine, theirs) in enumerate(zip(got, expected.tokens, strict=True)):
            if mine == theirs:
                continue
            row = expected.logits[position]
            margin = float(row[theirs] - row[mine])
            assert 0 <= margin <= TIE, f"prompt of {len(expected.prompt)}, token {position}: margin {margin}"
            flips += 1
            break
    return flips


def alone(oracle: Oracle, engine: InProcessEngine) -> int:
    for request in requests(oracle):
        engine.submit(request)
        engine.run()
    return compare(oracle, engine.answers())


def batched(oracle: Oracle, engine: InProcessEngine) -> int:
    for request in requests(oracle):
        engine.submit(request)
    engine.run()
    return compare(oracle, engine.answers())


def roving(oracle: Oracle, engine: InProcessEngine) -> int:
    """With every message the bounds of the border jump, and now and then the policy changes."""
    bounds = itertools.cycle([(0.7, 1.0), (0.0, 0.3), (0.4, 0.6), (0.0, 0.3), (0.7, 1.0)])
    chance = random.Random(5)

    def jump(_: ToFront) -> None:
        low, high = next(bounds)
        engine.ledger.objective = replace(engine.ledger.objective, min_decode_share=low, max_decode_share=high)
        if chance.random() < 0.1:
            engine.desk.mode = chance.choice(LIVE_MODES)

    engine.desk.heard = jump
    flips = batched(oracle, engine)
    assert engine.usage.border_moves >= 2
    return flips


def scattered(oracle: Oracle, engine: InProcessEngine) -> int:
    """In a pool whose free blocks lie apart, so that no sequence has a run of its own."""
    pool = engine.ledger.pool.device
    blocks = pool.allocate(pool.total)
    pool.release([block for block in blocks if block % 2])
    try:
        return batched(oracle, engine)
    finally:
        pool.release([block for block in blocks if block % 2 == 0])


def crowded(oracle: Oracle, engine: InProcessEngine) -> int:
    """All free blocks are gone when a sequence needs its next, so that another is pre-empted and computed again."""
    pool, grows = engine.ledger.pool.device, f"r{LENGTHS.index(13):02}"  # 13 tokens and 8 new ones: a second block
    taken: list[int] = []

    def squeeze(message: ToFront) -> None:
        if not isinstance(message, Tokens) or message.request_id != grows:
            return
        if taken and (engine.ledger.preemptions or message.finish is not None):
            pool.release(taken)
            taken.clear()
        elif not engine.ledger.preemptions:
            taken.extend(pool.allocate(pool.free))

    engine.desk.heard = squeeze
    flips = batched(oracle, engine)
    assert engine.ledger.preemptions > 0
    return flips


def again(oracle: Oracle, engine: InProcessEngine) -> int:
    """A second time, when all prompts are there but for their last tokens."""
    flips = batched(oracle, engine)
    engine.desk.sent.clear()
    flips += batched(oracle, engine)
    found = {m.request_id: m.cached_tokens for m in engine.desk.sent if isinstance(m, Tokens) and m.cached_tokens}
    assert found == {f"r{n:02}": (length - 1) // 16 * 16 for n, length in enumerate(LENGTHS) if length > 16}
    return flips


def swapped(oracle: Oracle, engine: InProcessEngine) -> int:
    """A second time, when most of the prompts have left the device for host memory."""
    flips = batched(oracle, engine)
    device, before = engine.ledger.pool.device, engine.ledger.pool.loaded_blocks
    engine.desk.sent.clear()
    flips += batched(oracle, engine)
    assert device.evictions > 0
    assert engine.ledger.pool.loaded_blocks > before
    found = {m.request_id: m.cached_tokens for m in engine.desk.sent if isinstance(m, Tokens) and m.cached_tokens}
    assert found == {f"r{n:02}": (length - 1) // 16 * 16 for n, length in enumerate(LENGTHS) if length > 16}
    return flips


WAYS = {
    "alone": alone,
    "batched": batched,
    "roving": roving,
    "scattered": scattered,
    "crowded": crowded,
    "again": again,
    "swapped": swapped,
}
# Where blocks change hands most; the canary makes a launch several times as long.
WATCHED = ("crowded", "again", "swapped")
CASES = [
    (ExecutionMode.MIXED_BATCH, "alone"),
    (ExecutionMode.MIXED_BATCH, "batched"),
    (ExecutionMode.LANES, "alone"),
    (ExecutionMode.LANES, "batched"),
    (ExecutionMode.LANES, "roving"),
    (ExecutionMode.LANES, "scattered"),
    (ExecutionMode.LANES, "crowded"),
    (ExecutionMode.LANES, "again"),
    (ExecutionMode.LANES, "swapped"),
    (ExecutionMode.DISAGGREGATED, "alone"),
    (ExecutionMode.DISAGGREGATED, "batched"),
]


OTHER_CASES = [
    (ExecutionMode.AUTO, "batched"),
    (ExecutionMode.CHUNKED_PREFILL, "batched"),
    (ExecutionMode.STATIC_LANES, "batched"),
    (ExecutionMode.MIXED_BATCH, "swapped"),
    (ExecutionMode.DISAGGREGATED, "scattered"),
    (ExecutionMode.DISAGGREGATED, "crowded"),
]
# No target holds anyone back, and passes are the smallest there are, so that prefill and decode overlap: what the
# policies do must not depend on how busy this machine is.
ANY_TIME = Objective(Slo(ttft_s=0.001, tpot_s=100.0))


def blocks_of(way: str) -> int:
    return 200 if way == "swapped" else 800


def engine_of(oracle: Oracle, mode: ExecutionMode, way: str) -> InProcessEngine:
    together = mode is not ExecutionMode.DISAGGREGATED
    return InProcessEngine(
        oracle.loaded,
        cores=CORES,
        mode=mode,
        kv_blocks=blocks_of(way),
        objective=ANY_TIME,
        host_slots=1000 if way == "swapped" else 0,
        names=TokenNames(b"", 16) if together else None,
        watched=together and way in WATCHED,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "way"), CASES + OTHER_CASES)
def test_tiny_models(tiny: Oracle, mode: ExecutionMode, way: str) -> None:
    with engine_of(tiny, mode, way) as engine:
        flips = WAYS[way](tiny, engine)
        assert flips <= 2
        assert engine.ledger.pool.free == blocks_of(way)
        endings = engine.endings().values()
        assert all(isinstance(end, Tokens) and end.finish is FinishReason.LENGTH for end in endings)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "way"), CASES)
def test_the_built_in_model(builtin: Oracle, mode: ExecutionMode, way: str) -> None:
    with engine_of(builtin, mode, way) as engine:
        flips = WAYS[way](builtin, engine)
        assert flips <= 2
        assert engine.ledger.pool.free == blocks_of(way)
