"""The parts of the hand-over that need no second process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from typing_extensions import override

from engine.core.models import save
from tidelane.engine.errors import CannotServe
from tidelane.engine.execution.executor import Completion, Sampled
from tidelane.engine.handover.carrier import SharedMemoryCarrier
from tidelane.engine.handover.messages import Compute, Computed, FromPrefill, Prompt, ToPrefill
from tidelane.engine.handover.opening import Cores
from tidelane.engine.handover.prefill_process import HandingModel
from tidelane.engine.handover.prefill_side import LONGEST_DELAY_S, restart_delay_s
from tidelane.engine.kv.cache import Holding
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.shared import SharedMemory, mapped
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import load
from tidelane.engine.request import NewToken, Request, Sampling, ServiceTier, TokenLogprob
from tidelane.engine.scheduling.plan import PrefillSlice, Span
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo

LAYOUT = KVLayout(layers=3, heads=2, key_dim=8, value_dim=4, element_bytes=4)
CPU = torch.device("cpu")


def filled(blocks: int) -> DevicePool:
    """Every number in it differs."""
    pool = DevicePool.allocate(LAYOUT, blocks, torch.float32, CPU)
    for number, tensor in enumerate((*pool.keys, *pool.values)):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1 + number * 1e5)
    return pool


def test_a_pool_fills_its_memory_and_no_two_tensors_overlap() -> None:
    memory = torch.zeros(5 * LAYOUT.block_bytes, dtype=torch.uint8)
    pool = DevicePool.within(memory, LAYOUT, 5, torch.float32)
    assert pool.blocks == 5
    for tensor in (*pool.keys, *pool.values):
        assert not tensor.any()
        tensor.fill_(1.0)
    assert bool((memory.view(torch.float32) == 1.0).all())


def test_memory_is_shared_by_its_descriptor_and_has_no_name(tmp_path: Path) -> None:
    names = set(Path("/dev/shm").iterdir())
    memory = SharedMemory(4096)
    ours, theirs = memory.mapped(), mapped(memory.fd, 4096)
    memory.close()
    theirs[7] = 9
    assert int(ours[7]) == 9
    assert set(Path("/dev/shm").iterdir()) == names


@pytest.mark.parametrize("blocks", [(), (0,), (2, 3, 4), (5, 1, 2), (0, 5)])
def test_a_carrier_copies_the_blocks_of_its_layer_and_nothing_else(blocks: Iterable[int]) -> None:
    source, target = filled(6), DevicePool.allocate(LAYOUT, 6, torch.float32, CPU)
    carrier = SharedMemoryCarrier(source, target)
    carrier.send(1, blocks)
    carrier.arrived()
    sent = torch.zeros(6, dtype=torch.bool)
    sent[list(blocks)] = True
    slots = sent.repeat_interleave(LAYOUT.block_tokens)
    for layer in range(LAYOUT.layers):
        for ours, theirs in ((source.keys, target.keys), (source.values, target.values)):
            expected = torch.where(slots.view(-1, 1, 1), ours[layer], 0.0) if layer == 1 else torch.zeros(())
            assert torch.equal(theirs[layer], expected.expand_as(theirs[layer]))


@pytest.mark.parametrize("sliceable", [True, False])
def test_each_layer_is_handed_over_once_it_is_done_and_changes_nothing(tmp_path: Path, sliceable: bool) -> None:
    loaded = load(save("llama", tmp_path / "llama"), "float32", None, CPU)
    layout = loaded.facts.kv_layout
    plain = SlicedModel(loaded.module)
    if not sliceable:
        plain.layers = 1
    ours, theirs = (DevicePool.allocate(layout, 4, torch.float32, CPU) for _ in range(2))
    handed: list[tuple[int, set[int]]] = []

    class Noting(SharedMemoryCarrier):
        @override
        def send(self, layer: int, blocks: Iterable[int]) -> None:
            handed.append((layer, set(blocks)))
            super().send(layer, blocks)

    batch = RaggedBatch.build([Rows(range(40), 0, [1, 2, 3])], ours)
    with torch.inference_mode():
        expected = plain.run_whole(batch)
        got = HandingModel(loaded, plain, Noting(ours, theirs)).run_whole(batch)
    assert torch.equal(got, expected)
    assert handed == [(layer, {1, 2, 3}) for layer in range(layout.layers)]
    for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert torch.equal(mine, other)


def test_a_prompt_is_the_same_sequence_on_the_other_side() -> None:
    request = Request(
        "r", (5, 6, 7), 9, Sampling(seed=3, logit_bias=((2, -1.5),), logprobs=2), 1.5, (2,), ServiceTier.FLEX
    )
    sequence = Sequence(request, Slo(ttft_s=1.0, tpot_s=0.1))
    sequence.append(NewToken(11), 2.0)
    sequence.append(NewToken(11), 3.0)
    sequence.holding = Holding([4, 9])
    order = Compute(PrefillSlice(7, (Span("r", 0, 5),), 0, 4), 2, (Prompt.of(sequence),))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=ToPrefill)
    assert told == order
    assert isinstance(told, Compute)
    theirs = told.prompts[0].sequence()
    assert (theirs.request, theirs.tokens, theirs.blocks) == (request, [5, 6, 7, 11, 11], [4, 9])
    assert theirs.output_counts == sequence.output_counts
    sampled = Sampled("r", NewToken(1, TokenLogprob(1, -0.5, ((1, -0.5), (4, float("-inf"))))), (None,))
    answer = Computed(Completion(None, order.part, 2, 1.0, 2.0, (sampled,)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=FromPrefill) == answer


@pytest.mark.parametrize(
    ("cores", "decode", "prefill"),
    [((0, 1), (0,), (1,)), ((4, 5, 6), (4,), (5, 6)), ((0, 1, 0, 1), (0,), (1,)), ((0, 1, 2, 3), (0, 1), (2, 3))],
)
def test_no_core_is_on_both_sides(cores: tuple[int, ...], decode: tuple[int, ...], prefill: tuple[int, ...]) -> None:
    assert Cores.split(cores) == Cores(decode, prefill)


def test_sixteen_cores_are_halved() -> None:
    split = Cores.split(tuple(range(16)))
    assert len(split.decode) == len(split.prefill) == 8


def test_one_core_is_refused_with_the_reason() -> None:
    with pytest.raises(
        CannotServe, match="needs two cores, one for each of its processes; this engine may use one, core 3"
    ):
        Cores.split((3, 3))


def test_restarts_are_spaced_out_up_to_a_limit() -> None:
    assert [restart_delay_s(failures) for failures in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_DELAY_S]
    assert restart_delay_s(10_000) == LONGEST_DELAY_S
