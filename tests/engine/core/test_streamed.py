"""A context that streams through a few blocks of the device gives the logits that a resident one gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.moves import LoadLost
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.kv.streaming import ContextFull, StreamedContext
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import load
from tidelane.engine.model.streamed import StreamedModel

from .models import FAMILIES, save

PROMPT = 500
NEW_TOKENS = 40  # over two blocks: the device's end is stored while decode goes on
CHUNK = 56  # three blocks and a half: chunks end within blocks
BLOCKS = StreamRun(first=1, part_blocks=2, own_blocks=5)


@dataclass(frozen=True)
class Rig:
    model: SlicedModel
    layout: KVLayout

    def context(self, tokens: int) -> StreamedContext:
        """Host slots in random order, over memory full of what would be seen if it were read too early."""
        pool = DevicePool.allocate(self.layout, BLOCKS.first + BLOCKS.count, torch.float32, torch.device("cpu"))
        host = HostMemory.allocate(self.layout, self.layout.blocks_for(tokens))
        for part in (*pool.keys, *pool.values, host.memory.view(torch.float32)):
            part.fill_(float("nan"))
        slots = list(range(host.slots))
        random.Random(8).shuffle(slots)
        return StreamedContext(pool, host, BLOCKS, slots, Traffic())


def rig(family: str, folder: Path) -> Rig:
    loaded = load(save(family, folder), "float32", None, torch.device("cpu"))
    return Rig(SlicedModel(loaded.module), loaded.facts.kv_layout)


# The everyday loop takes the two that differ most.
_EVERYDAY = ("llama", "deepseek")
_PARAMS = [each if each in _EVERYDAY else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]


@pytest.fixture(scope="module", params=_PARAMS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("llama", tmp_path_factory.mktemp("llama"))


def prompt() -> list[int]:
    chance = random.Random(4)
    return [chance.randrange(3, 512) for _ in range(PROMPT)]


@torch.inference_mode()
def resident(rig: Rig) -> Iterator[torch.Tensor]:
    """Logits after the prompt, in the same chunks, and after each greedy token."""
    blocks = rig.layout.blocks_for(PROMPT + NEW_TOKENS)
    pool = DevicePool.allocate(rig.layout, blocks, torch.float32, torch.device("cpu"))
    tokens, start = prompt(), 0
    while True:
        rows = tokens[start : start + CHUNK]
        logits = rig.model.run_whole(RaggedBatch.build([Rows(rows, start, list(range(blocks)))], pool))[-1]
        start += len(rows)
        if start == len(tokens):
            yield logits
            tokens.append(int(logits.argmax()))


def test_logits_and_greedy_tokens_are_those_of_a_resident_context(family: Rig) -> None:
    assert BLOCKS.count * family.layout.block_tokens < PROMPT / 3
    context = family.context(PROMPT + NEW_TOKENS)
    streamed = StreamedModel(family.model, context)
    try:
        logits = streamed.prefill(prompt(), CHUNK)
        for step, expected in zip(range(NEW_TOKENS), resident(family), strict=False):
            assert context.length == PROMPT + step
            torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max()))
            assert logits.argmax() == expected.argmax()
            logits = streamed.run([int(expected.argmax())])
        assert context.stored == (PROMPT + NEW_TOKENS) // 16 * 16
    finally:
        context.close()


def test_a_pass_whose_parts_do_not_come_can_be_run_again(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    context = llama.context(PROMPT)
    streamed = StreamedModel(llama.model, context)
    tokens = prompt()
    load_run, loads = HostMemory.load_run, []

    def load_all_but_the_fifth(self: HostMemory, *arguments: object) -> None:
        loads.append(arguments)
        if len(loads) == 5:
            raise OSError("a bad page")
        load_run(self, *arguments)  # type: ignore[arg-type]

    try:
        streamed.prefill(tokens[:448], CHUNK)
        monkeypatch.setattr(HostMemory, "load_run", load_all_but_the_fifth)
        with pytest.raises(LoadLost, match="layer 0 of KV from block 8 on"):
            streamed.run(tokens[448:])
        assert context.length == 448
        again = streamed.run(tokens[448:])
        torch.testing.assert_close(again, next(resident_in(llama, [448, PROMPT])), rtol=0.0, atol=1e-3)
    finally:
        context.close()


@torch.inference_mode()
def resident_in(rig: Rig, ends: list[int]) -> Iterator[torch.Tensor]:
    blocks = rig.layout.blocks_for(PROMPT)
    pool = DevicePool.allocate(rig.layout, blocks, torch.float32, torch.device("cpu"))
    for start, end in zip([0, *ends], ends, strict=False):
        rows = Rows(prompt()[start:end], start, list(range(blocks)))
        logits = rig.model.run_whole(RaggedBatch.build([rows], pool))[-1]
    yield logits


def test_what_does_not_fit_is_refused_before_anything_is_written(llama: Rig) -> None:
    context = llama.context(96)
    streamed = StreamedModel(llama.model, context)
    try:
        with pytest.raises(ContextFull, match="65 tokens at once, and the device has room for 64"):
            streamed.run(prompt()[:65])
        streamed.prefill(prompt()[:90], 64)
        with pytest.raises(ContextFull, match="97 tokens, and host memory has slots for 96"):
            streamed.run(prompt()[90:97])
        assert context.length == 90
        assert streamed.run(prompt()[90:96]).isfinite().all()
    finally:
        context.close()
