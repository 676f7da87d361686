"""Bytes on their way between the device and host memory: all of them, and no others."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from tidelane.engine.kv.codecs import codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_copier import HostCopier
from tidelane.engine.kv.host_memory import HostMemory, runs
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.mover import CopyingMover
from tidelane.engine.kv.moves import Arrival, Load, LoadLost, Move, Store
from tidelane.engine.kv.traffic import Traffic

BLOCKS, SLOTS = 12, 9


def layout(dtype: torch.dtype, value_dim: int = 6) -> KVLayout:
    return KVLayout(3, 2, key_dim=8, value_dim=value_dim, element_bytes=dtype.itemsize, block_tokens=4)


def filled(made: KVLayout, dtype: torch.dtype) -> DevicePool:
    pool = DevicePool.allocate(made, BLOCKS, dtype, torch.device("cpu"))
    for part in (*pool.keys, *pool.values):
        part.view(torch.uint8).random_()  # NaNs of all kinds among them
    return pool


def bytes_of(pool: DevicePool) -> list[torch.Tensor]:
    """[blocks, bytes] of each part, copied."""
    return [part.view(BLOCKS, -1).view(torch.uint8).clone() for part in (*pool.keys, *pool.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("seed", range(4))
def test_a_block_comes_back_as_it_left_and_no_other_changes(dtype: torch.dtype, value_dim: int, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    made = layout(dtype, value_dim)
    pool, host = filled(made, dtype), HostMemory.allocate(made, SLOTS)
    host.memory.random_()
    before_device, before_host = bytes_of(pool), host.memory.clone()
    count = chance.randint(1, 6)
    source, slots = chance.sample(range(BLOCKS), count), chance.sample(range(SLOTS), count)
    if seed % 2:
        source, slots = sorted(source), sorted(slots)

    host.store(pool, source, slots)
    assert all(torch.equal(now, then) for now, then in zip(bytes_of(pool), before_device, strict=True))
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(host.memory[others], before_host[others])

    target = chance.sample(range(BLOCKS), count)
    for part in (*pool.keys, *pool.values):
        part.zero_()
    stored = host.memory.clone()
    for layer in range(made.layers):
        host.load(pool, target, slots, layer)
    assert torch.equal(host.memory, stored)
    for now, then in zip(bytes_of(pool), before_device, strict=True):
        assert torch.equal(now[target], then[source])
        untouched = [block for block in range(BLOCKS) if block not in target]
        assert not now[untouched].any()


def test_a_layer_is_loaded_by_itself() -> None:
    made = layout(torch.float32)
    pool, host = filled(made, torch.float32), HostMemory.allocate(made, SLOTS)
    host.store(pool, [3], [5])
    first = pool.keys[0][12:16].clone()
    for part in (*pool.keys, *pool.values):
        part.zero_()
    host.load(pool, [7], [5], 0)
    assert torch.equal(pool.keys[0][28:32], first)
    assert not pool.keys[1].any()
    assert not pool.values[2].any()


@pytest.mark.parametrize(("held_as", "worst"), [("bf16", 1 / 256), ("fp8", 1 / 16), ("int8", 1 / 100), ("int4", 1 / 6)])
def test_with_a_codec_it_comes_back_rounded_in_less_room(held_as: str, worst: float) -> None:
    made = KVLayout(3, 2, key_dim=64, value_dim=32, element_bytes=4, block_tokens=16)
    pool, host = filled(made, torch.float32), HostMemory.allocate(made, SLOTS, codec(held_as))
    for part in (*pool.keys, *pool.values):
        part.normal_(generator=torch.Generator().manual_seed(1))
    assert host.memory[0].nbytes == len(host.record(0)) <= 0.51 * made.block_bytes
    then = [part.clone() for part in (*pool.keys, *pool.values)]
    host.store(pool, [3, 4, 9], [5, 6, 0])
    for part in (*pool.keys, *pool.values):
        part.zero_()
    for layer in range(made.layers):
        host.load(pool, [7, 8, 1], [5, 6, 0], layer)
    for now, before in zip((*pool.keys, *pool.values), then, strict=True):
        by_block = now.view(BLOCKS, -1)
        off = by_block[[7, 8, 1]] - before.view(BLOCKS, -1)[[3, 4, 9]]
        assert 0 < float(off.abs().max()) <= worst * float(before.abs().max())
        assert not by_block[[0, 2, 3, 4, 5, 6, 9, 10, 11]].any()


def test_adjacent_blocks_are_one_copy() -> None:
    assert list(runs([4, 5, 6, 9, 10, 3])) == [(4, 0, 3), (9, 3, 2), (3, 5, 1)]
    assert list(runs([])) == []


class Notified:
    """Waits until so many moves have ended."""

    def __init__(self) -> None:
        self._rang = threading.Semaphore(0)

    def __call__(self) -> None:
        self._rang.release()

    def ended(self, mover: CopyingMover, count: int) -> list[tuple[Move, bool]]:
        ended: list[tuple[Move, bool]] = []
        while len(ended) < count:
            assert self._rang.acquire(timeout=30)
            ended += mover.poll()
        return ended


def test_the_mover_tells_what_has_ended_and_how() -> None:
    made = layout(torch.float32)
    pool, host = filled(made, torch.float32), HostMemory.allocate(made, SLOTS)
    wanted = bytes_of(pool)
    told = Notified()
    traffic = Traffic()
    mover = CopyingMover([HostCopier(pool, host)], told, traffic)
    try:
        stores: list[Move] = [Store(0, b"a", 2, 4), Store(1, b"b", 3, 5)]
        mover.start(stores)
        assert told.ended(mover, 2) == [(stores[0], True), (stores[1], True)]
        for part in (*pool.keys, *pool.values):
            part.zero_()
        load = Load(2, (b"a", b"b"), (4, 5), (8, 0), Arrival())
        mover.start([load])
        for layer in range(made.layers):
            load.arrival.wait(layer)
        assert told.ended(mover, 1) == [(load, True)]
        for now, then in zip(bytes_of(pool), wanted, strict=True):
            assert torch.equal(now[[8, 0]], then[[2, 3]])
        wrong = Load(3, (b"a",), (99,), (1,), Arrival())
        mover.start([wrong, Load(4, (b"b",), (5,), (6,), Arrival())])
        assert [well for _, well in told.ended(mover, 2)] == [False, True]
        with pytest.raises(LoadLost, match="layer 0 of KV from a lower tier did not come"):
            wrong.arrival.wait(0)
    finally:
        mover.close()
