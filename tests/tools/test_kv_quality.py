from __future__ import annotations

import pytest
import torch
from tools.kv_quality import matched_prefix
from tools.kv_variants import VARIANTS, Variant, through

from tidelane.engine.kv.codecs import codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout

SEQUENCES = [[1, 2], [6, 4, 3]]


def filled() -> DevicePool:
    layout = KVLayout(layers=2, heads=1, key_dim=8, value_dim=4, element_bytes=4)
    pool = DevicePool.allocate(layout, 8, torch.float32, torch.device("cpu"))
    for number, side in enumerate((*pool.keys, *pool.values)):
        side.copy_(torch.randn(side.shape, generator=torch.Generator().manual_seed(number)))
    return pool


def changed(variant: Variant) -> set[int]:
    """Blocks that `through` left with other numbers, on any side of any layer."""
    before, after = filled(), filled()
    through(variant, after, SEQUENCES)
    pairs = zip((*before.keys, *before.values), (*after.keys, *after.values), strict=True)
    return {int(slot) // 16 for was, now in pairs for slot in (was != now).flatten(1).any(1).nonzero()}


def test_raw_blocks_come_back_as_they_went() -> None:
    assert changed(Variant(codec("raw"))) == set()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: each.name)
def test_the_blocks_of_the_sequences_go_through_the_codec_and_no_others(variant: Variant) -> None:
    assert changed(variant) == ({2, 4, 3} if variant.first_raw else {1, 2, 6, 4, 3})


def test_the_tokens_before_the_first_difference_count() -> None:
    assert matched_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert matched_prefix([1, 2], [1, 2]) == 2
    assert matched_prefix([5], [1]) == 0
