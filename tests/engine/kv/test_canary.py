"""The canary sings for each way in which a slot may hold what it should not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tidelane.engine.kv.canary import Canary, WrongKV
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout

LAYOUT = KVLayout(layers=2, heads=2, key_dim=4, value_dim=3, element_bytes=4, block_tokens=4)
TOKENS = list(range(100, 110))
BLOCKS = [5, 2, 7]


@pytest.fixture
def pool() -> DevicePool:
    pool = DevicePool.allocate(LAYOUT, 8, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    for part in (*pool.keys, *pool.values):
        part.copy_(torch.randn(part.shape))
    return pool


@pytest.fixture
def canary(pool: DevicePool) -> Canary:
    canary = Canary(8, LAYOUT.block_tokens, pool.prints)
    canary.opens(BLOCKS, 0, 10)
    canary.wrote(BLOCKS, TOKENS, 0, 10)
    return canary


def test_what_is_right_passes(canary: Canary) -> None:
    canary.check("r1", BLOCKS, TOKENS, 10)
    canary.check("r1", BLOCKS, TOKENS, 0)


@pytest.mark.parametrize(
    ("blocks", "tokens", "message"),
    [
        ([2, 5, 7], TOKENS, "r1, position 0, in slot 8 of block 2: the token is 104 by the shadow, and should be 100"),
        ([5, 3, 7], TOKENS, "r1, position 4, in slot 12 of block 3: the token is -2"),
        (
            BLOCKS,
            [*TOKENS[:9], 7],
            "r1, position 9, in slot 29 of block 7: the token is 109 by the shadow, and should be 7",
        ),
    ],
)
def test_the_wrong_block_or_token(canary: Canary, blocks: list[int], tokens: list[int], message: str) -> None:
    with pytest.raises(WrongKV, match=message):
        canary.check("r1", blocks, tokens, 10)


def test_a_slot_that_another_is_writing(canary: Canary) -> None:
    canary.opens([7], 1, 2)
    with pytest.raises(WrongKV, match="position 9, in slot 29 of block 7: the token is -1"):
        canary.check("r1", BLOCKS, TOKENS, 10)


def test_the_right_token_of_another_position(canary: Canary) -> None:
    canary.wrote([5, 2], [0, 0, 0, 0, 0, *TOKENS[4:7]], 5, 8)
    with pytest.raises(WrongKV, match="position 5, in slot 9 of block 2: the token is 104"):
        canary.check("r1", BLOCKS, TOKENS, 10)
    canary.wrote([2, 2], [0, 0, 0, 0, *TOKENS[4:8]], 4, 8)
    canary.check("r1", BLOCKS, TOKENS, 10)
    canary.wrote([2], TOKENS[4:8], 0, 4)
    with pytest.raises(WrongKV, match="position 4, in slot 8 of block 2: the position is 0 by the shadow"):
        canary.check("r1", BLOCKS, TOKENS, 10)


def _flip(part: torch.Tensor) -> None:
    part[9, 1, 2] += 1


def _swap(part: torch.Tensor) -> None:
    part[8, 0, 0], part[8, 0, 1] = part[8, 0, 1].clone(), part[8, 0, 0].clone()


@pytest.mark.parametrize("disturb", [_flip, _swap])
@pytest.mark.parametrize("number", range(4))
def test_bytes_that_nobody_wrote_on_purpose(
    canary: Canary, pool: DevicePool, disturb: Callable[[torch.Tensor], None], number: int
) -> None:
    disturb((*pool.keys, *pool.values)[number])
    with pytest.raises(WrongKV, match="of block 2: the bytes"):
        canary.check("r1", BLOCKS, TOKENS, 10)


def test_bytes_of_other_slots_do_not_matter(canary: Canary, pool: DevicePool) -> None:
    pool.keys[0][np.array([0, 16, 31])] = 9.0
    canary.check("r1", BLOCKS, TOKENS, 10)
