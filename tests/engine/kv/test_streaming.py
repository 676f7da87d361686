"""Parts of a context come up through two buffers, in order, none before its buffer is done with."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.kv.streaming import PartReader, StreamedContext
from tidelane.engine.kv.traffic import Traffic

LAYOUT = KVLayout(layers=2, heads=2, key_dim=4, value_dim=2, element_bytes=4, block_tokens=4)
WAIT_S = 20.0


def kv(position: int, layer: int) -> float:
    return 1000.0 * (layer + 1) + position


def memory(blocks: StreamRun, slots: int) -> tuple[DevicePool, HostMemory]:
    """Outside of the blocks the pool is full of -1."""
    pool = DevicePool.allocate(LAYOUT, blocks.first + blocks.count + 1, torch.float32, torch.device("cpu"))
    for part in (*pool.keys, *pool.values):
        part.fill_(-1.0)
    return pool, HostMemory.allocate(LAYOUT, slots)


def new_kv(start: int, rows: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.tensor([kv(at, layer) for at in range(start, start + rows)]).view(-1, 1, 1)
    return numbers.expand(-1, 2, 4), -numbers.expand(-1, 2, 2)


def write(context: StreamedContext, rows: int) -> None:
    for layer in range(LAYOUT.layers):
        context.write(layer, *new_kv(context.length, rows, layer))
    context.advance(rows)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(StreamRun, st.integers(0, 2), st.integers(1, 4), st.integers(2, 4)),
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.integers(0, 200),
    st.randoms(use_true_random=False),
)
def test_what_was_written_is_what_is_read_and_nothing_else_is_touched(
    blocks: StreamRun, passes: list[int], first: int, chance: random.Random
) -> None:
    slots = list(range(100))
    chance.shuffle(slots)
    pool, host = memory(blocks, len(slots))
    context = StreamedContext(pool, host, blocks, slots, Traffic())
    try:
        for rows in passes:
            write(context, min(rows, context.pass_tokens))
        for layer in range(LAYOUT.layers):
            read = []
            for part in context.parts(layer, first):
                assert len(part.keys) <= blocks.part_blocks * LAYOUT.block_tokens
                read += [(part.first + at, *row) for at, row in enumerate(_numbers(part.keys, part.values))]
            own = context.own(layer, 0)
            read += [(own.first + at, *row) for at, row in enumerate(_numbers(own.keys, own.values))]
            begun = min(first // LAYOUT.block_tokens * LAYOUT.block_tokens, context.stored)
            assert read == [(at, kv(at, layer), -kv(at, layer)) for at in range(begun, context.length)]
            end = (blocks.first + blocks.count) * LAYOUT.block_tokens
            for side in (pool.keys[layer], pool.values[layer]):
                assert (torch.cat([side[: blocks.first * LAYOUT.block_tokens], side[end:]]) == -1.0).all()
    finally:
        context.close()


def _numbers(keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[float, float]]:
    """The one number of each token's keys, and of its values."""
    for key, value in zip(keys, values, strict=True):
        (k,), (v,) = set(key.flatten().tolist()), set(value.flatten().tolist())
        yield k, v


def test_the_next_part_comes_while_one_is_held_and_the_one_after_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = StreamRun(first=0, part_blocks=1, own_blocks=2)
    pool, host = memory(blocks, 6)
    load_run, ended, asked = HostMemory.load_run, threading.Semaphore(0), 0
    begun: list[tuple[int, int]] = []

    def load(self: HostMemory, pool: DevicePool, layer: int, first: int, slots: torch.Tensor) -> None:
        begun.append((int(slots[0]), asked))
        load_run(self, pool, layer, first, slots)
        ended.release()

    monkeypatch.setattr(HostMemory, "load_run", load)
    reader = PartReader(pool, host, blocks, Traffic())
    try:
        parts = reader.read(0, torch.arange(6), 0)
        for number in range(6):
            # Two copies begin at once; asking for a part frees the buffer of the one before, for the one after.
            for _ in range(2 if number == 0 else int(2 <= number < 6)):
                assert ended.acquire(timeout=WAIT_S)
            asked += 1
            next(parts)
    finally:
        reader.close()
    assert begun == [(0, 0), (1, 0), (2, 2), (3, 3), (4, 4), (5, 5)]


def test_a_pool_too_small_is_refused_with_both_numbers() -> None:
    pool, host = memory(StreamRun(0, 1, 2), 4)
    with pytest.raises(ValueError, match="the pool has 5 blocks, not the 8"):
        StreamedContext(pool, host, StreamRun(1, 2, 3), range(4), Traffic())
    with pytest.raises(ValueError, match="two for what is computed"):
        StreamedContext(pool, host, StreamRun(0, 1, 1), range(4), Traffic())
