from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.execution.graphs import StepBuffers, bucket_for, buckets, seat
from tidelane.engine.kv.cache import Holding
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.request import Request, Sampling
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo

BLOCKS = 8  # and the spare one
POOL = DevicePool.allocate(KVLayout(1, 1, 4, 4, 4, block_tokens=4), BLOCKS + 1, torch.float32, torch.device("cpu"))
SPARE_SLOT = BLOCKS * 4


def sequence(name: str, computed: int, blocks: list[int]) -> Sequence:
    request = Request(name, tuple(range(10, 11 + computed)), 100, Sampling(seed=0), arrival_s=0.0)
    return Sequence(request, Slo(1.0, 1.0), computed=computed, holding=Holding(blocks))


def test_batches_are_filled_up_to_powers_of_two() -> None:
    assert buckets(1) == (1,)
    assert buckets(6) == (1, 2, 4, 6)
    assert buckets(256) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert [bucket_for(n, buckets(256)) for n in (1, 2, 3, 5, 128, 129, 256, 257)] == [1, 2, 4, 8, 128, 256, 256, None]


@given(st.integers(1, 5000), st.integers(1, 300))
def test_a_bucket_holds_its_batch_and_is_less_than_twice_too_large(rows: int, most: int) -> None:
    bucket = bucket_for(rows, buckets(most))
    if rows > most:
        assert bucket is None
    else:
        assert bucket is not None
        assert rows <= bucket < 2 * rows


names = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(names, names)
def test_everyone_gets_one_seat_and_keeps_it(before: list[str], now: list[str]) -> None:
    first = seat(tuple(before), (), 8)
    second = seat(tuple(now), first, 8)
    assert sorted(who for who in second if who is not None) == sorted(now)
    assert all(second[first.index(who)] == who for who in now if who in first)


def test_who_sat_beyond_a_smaller_bucket_moves_into_it() -> None:
    assert seat(("c", "d"), ("a", "b", "c", "d"), 2) == ("c", "d")


def test_a_step_is_written_where_each_sits() -> None:
    buffers = StepBuffers(POOL, most_rows=4, most_tokens=32, vocab_size=5)
    sequences = {"a": sequence("a", 5, [2, 3]), "b": sequence("b", 0, [6])}
    assert buffers.fill(sequences, ("a", "b"), 4) == ("a", "b", None, None)
    assert buffers.inputs[StepBuffers.TOKEN].tolist() == [15, 10, 0, 0]
    assert buffers.inputs[StepBuffers.POSITION].tolist() == [5, 0, 0, 0]
    assert buffers.inputs[StepBuffers.SLOT].tolist() == [3 * 4 + 1, 6 * 4, SPARE_SLOT, SPARE_SLOT]
    assert buffers.inputs[StepBuffers.CONTEXT].tolist() == [6, 1, 1, 1]
    assert buffers.table[0, :2].tolist() == [2, 3]
    assert buffers.table[:, 0].tolist() == [2, 6, BLOCKS, BLOCKS]


def test_a_table_row_follows_its_sequence() -> None:
    buffers = StepBuffers(POOL, most_rows=2, most_tokens=32, vocab_size=5)
    grown = sequence("a", 3, [2])
    buffers.fill({"a": grown}, ("a",), 1)
    grown.holding.blocks += [7, 1]
    buffers.fill({"a": grown}, ("a",), 1)
    assert buffers.table[0, :3].tolist() == [2, 7, 1]

    preempted = sequence("a", 3, [5, 4])
    buffers.fill({"a": preempted}, ("a",), 1)
    assert buffers.table[0, :2].tolist() == [5, 4]

    other = sequence("b", 3, [0])
    buffers.fill({"b": other}, ("b",), 1)
    assert buffers.table[0, 0] == 0
    buffers.fill({"b": other, "a": preempted}, ("a", "b"), 2)
    assert buffers.table[:, 0].tolist() == [0, 5]


def test_an_empty_step_is_nobodys() -> None:
    buffers = StepBuffers(POOL, most_rows=2, most_tokens=8, vocab_size=5)
    buffers.fill({"a": sequence("a", 3, [2])}, ("a",), 1)
    buffers.empty()
    assert buffers.inputs[StepBuffers.SLOT].tolist() == [SPARE_SLOT] * 2
    assert buffers.table[:, 0].tolist() == [BLOCKS] * 2


@pytest.mark.parametrize("rows", [1, 2])
def test_a_batch_is_a_view_of_the_buffers(rows: int) -> None:
    from tidelane.engine.model.attention_cuda import PLAIN

    buffers = StepBuffers(POOL, most_rows=2, most_tokens=8, vocab_size=5)
    batch = buffers.batch(POOL, PLAIN, rows)
    buffers.fill({"a": sequence("a", 3, [2])}, ("a",), 1)
    assert batch.tokens.tolist()[0] == 13
    assert batch.steps is not None
    assert batch.steps.contexts.data_ptr() == buffers.inputs[StepBuffers.CONTEXT].data_ptr()
    assert len(batch.steps.contexts) == len(batch.steps.blocks) == rows
