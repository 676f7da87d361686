"""Attention over parts of a context, in any cut and any order, is attention over all of it."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.kv.streaming import Part
from tidelane.engine.model.attention_parts import Attended, attend_part

SEEDS = st.integers(0, 2**31 - 1)


@st.composite
def cut_contexts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Tokens of a context, and where it is cut."""
    context = draw(st.integers(1, 400))
    return context, sorted(draw(st.sets(st.integers(1, context), max_size=6)) | {context})


def whole(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """In float64, by the definition: [heads, rows, value_dim]. The queries are the last of the context."""
    heads, rows, _ = query.shape
    group = heads // keys.shape[1]
    keys, values = (side.double().transpose(0, 1).repeat_interleave(group, 0) for side in (keys, values))
    back = torch.arange(len(keys[0]) - rows, len(keys[0])).unsqueeze(1) - torch.arange(len(keys[0]))
    scores = query.double() @ keys.transpose(1, 2) * scale
    return scores.masked_fill((back < 0) | (back >= window), -math.inf).softmax(-1) @ values


@settings(max_examples=60, deadline=None)
@given(
    cut_contexts(),
    st.integers(1, 150),
    st.sampled_from([(1, 1), (1, 4), (2, 3)]),
    st.sampled_from([(8, 8), (24, 12)]),
    st.one_of(st.none(), st.integers(1, 300)),
    SEEDS,
)
def test_any_cut_of_a_context_gives_attention_to_all_of_it(
    cut: tuple[int, list[int]],
    rows: int,
    grouping: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    seed: int,
) -> None:
    context, ends = cut
    rows = min(rows, context)
    kv_heads, group = grouping
    chance = torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads * group, rows, dims[0], generator=chance) * 3
    keys, values = (torch.randn(context, kv_heads, dim, generator=chance) for dim in dims)
    start, scale = context - rows, dims[0] ** -0.5

    parts = [Part(first, keys[first:end], values[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
    order = torch.randperm(len(parts), generator=chance).tolist()
    attended = (attend_part(query, start, parts[at], scale, window) for at in order)
    merged = reduce(Attended.merged, attended)

    expected = whole(query, keys, values, scale, context if window is None else window)
    torch.testing.assert_close(merged.out.double(), expected, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("value_dim", [8, 4])
def test_the_sum_of_exponentials_is_told_with_each_part(value_dim: int) -> None:
    """The flash kernel has the values as wide as the keys; it is a private operator of torch, hence this test."""
    chance = torch.Generator().manual_seed(5)
    query = torch.randn(2, 3, 8, generator=chance)
    part = Part(0, torch.randn(40, 1, 8, generator=chance), torch.randn(40, 1, value_dim, generator=chance))
    attended = attend_part(query, 40, part, 0.5, None)
    expected = torch.logsumexp(query.double() @ part.keys[:, 0].double().T * 0.5, -1)
    torch.testing.assert_close(attended.log_sum.double(), expected, rtol=0.0, atol=1e-5)


def test_a_query_that_sees_nothing_of_a_part_has_nothing_of_it() -> None:
    part = Part(0, torch.randn(16, 1, 8), torch.randn(16, 1, 8))
    attended = attend_part(torch.randn(1, 2, 8), 17, part, 1.0, 3)  # at 17 and 18, which see from 15 and 16 on
    assert attended.log_sum.isneginf().tolist() == [[False, True]]
    torch.testing.assert_close(attended.out[0, 0], part.values[15, 0])
    assert attended.out[0, 1].tolist() == [0.0] * 8


def test_half_as_many_bits_are_merged_in_float32() -> None:
    chance = torch.Generator().manual_seed(6)
    query = torch.randn(4, 20, 8, generator=chance).bfloat16()
    keys, values = (torch.randn(120, 2, 8, generator=chance).bfloat16() for _ in range(2))
    parts = [Part(first, keys[first : first + 40], values[first : first + 40]) for first in (80, 0, 40)]
    merged = reduce(Attended.merged, (attend_part(query, 100, part, 0.3, None) for part in parts))
    assert merged.out.dtype == torch.float32
    torch.testing.assert_close(merged.out.double(), whole(query, keys, values, 0.3, 120), rtol=0.0, atol=2e-2)
