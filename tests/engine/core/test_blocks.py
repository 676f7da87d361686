from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.kv.blocks import BlockPool, OutOfBlocks


@given(st.integers(1, 60), st.lists(st.tuples(st.sampled_from("agrfu"), st.integers(0, 12)), max_size=60))
def test_every_block_is_free_or_held_once(total: int, steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(total)
    held: list[list[int]] = []
    fence = total
    for action, n in steps:
        if action == "a" and n <= pool.free:
            held.append(pool.allocate(n))
        elif action == "g" and held and held[n % len(held)] and pool.free:
            held[n % len(held)] += pool.allocate(1, after=held[n % len(held)][-1])
        elif action == "r" and held:
            pool.release(held.pop(n % len(held)))
        elif action == "f" and fence == total and n < total:
            fence = n
            pool.fence(fence)
        elif action == "u":
            fence = total
            pool.unfence()
        blocks = [block for owned in held for block in owned]
        assert len(set(blocks)) == len(blocks)
        assert all(0 <= block < total for block in blocks)
        assert pool.kept == len(set(range(fence, total)) - set(blocks))
        assert pool.free == total - len(blocks) - pool.kept
    for owned in held:
        pool.release(owned)
    pool.unfence()
    assert sorted(pool.allocate(total)) == list(range(total))


def test_sequences_that_grow_side_by_side_stay_in_one_run() -> None:
    pool = BlockPool(1000)
    sequences = [pool.allocate(4) for _ in range(8)]
    for _ in range(20):
        for blocks in sequences:
            blocks += pool.allocate(1, after=blocks[-1])
    assert all(blocks == list(range(blocks[0], blocks[0] + 24)) for blocks in sequences)


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 free"):
        pool.allocate(2)
    assert pool.free == 1


@pytest.mark.parametrize("block", [-1, 4, 2])
def test_a_block_that_is_not_held_cannot_be_released(block: int) -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match=f"block {block} is not held"):
        pool.release([block])
    assert pool.free == 2
