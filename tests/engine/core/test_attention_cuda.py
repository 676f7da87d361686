"""The GPU's attention, as far as a CPU can tell: batches, the plain kernels, and Triton's in its interpreter.

The interpreter is chosen when the kernel is imported, so it has a process of its own, as has the compiler.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.model.attention_cuda import PLAIN, Trial, _window_size, choose_kernels
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.paged import KeysValues, PagedBatch, slots_of

LAYOUT = KVLayout(layers=1, heads=2, key_dim=8, value_dim=4, element_bytes=4, block_tokens=4)
HEADS = 6


def pool() -> DevicePool:
    made = DevicePool.allocate(LAYOUT, 40, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in (*made.keys, *made.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def by_hand(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Queries [rows, heads, dim], the last of the context [context, kv_heads, dim], one by one."""
    rows, context = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    out = torch.empty(rows, query.shape[1], values.shape[2])
    for row in range(rows):
        at = context - rows + row
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(query.shape[1]):
            scores = keys[first : at + 1, head // group] @ query[row, head] / math.sqrt(query.shape[2])
            out[row, head] = torch.softmax(scores, 0) @ values[first : at + 1, head // group]
    return out


@given(st.integers(0, 30), st.integers(1, 30), st.permutations(range(15)))
def test_slots_are_those_of_the_blocks(start: int, tokens: int, blocks: list[int]) -> None:
    expected = [blocks[at // 4] * 4 + at % 4 for at in range(start, start + tokens)]
    assert slots_of(blocks, start, start + tokens, 4).tolist() == expected


def test_a_batch_has_the_rows_of_the_cpus() -> None:
    made = pool()
    steps = [Rows([5], 9, [3, 1, 7]), Rows([6], 0, [9])]
    spans = [Rows([1, 2, 3], 0, [4]), Rows([7, 8], 6, [2, 11])]
    ours, theirs = PagedBatch.build(steps, spans, made, PLAIN), RaggedBatch.build([*steps, *spans], made)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.positions, theirs.positions)
    assert torch.equal(ours.write_slots, theirs.write_slots)
    assert ours.steps is not None
    assert ours.steps.contexts.tolist() == [10, 1]
    assert ours.spans is not None
    assert ours.spans.row_starts.tolist() == [0, 3, 5]
    assert ours.spans.context_starts.tolist() == [0, 3, 11]
    assert ours.spans.slots is not None
    assert ours.spans.slots.tolist() == [16, 17, 18, 8, 9, 10, 11, 44, 45, 46, 47]


def test_fresh_prompts_need_no_gathering() -> None:
    batch = PagedBatch.build([], [Rows([1, 2, 3], 0, [4]), Rows([7, 8], 0, [2])], pool(), PLAIN)
    assert batch.spans is not None
    assert batch.spans.slots is None


@pytest.mark.parametrize("window", [None, 3, 100])
def test_plain_steps_and_spans(window: int | None) -> None:
    made = pool()
    layer = KeysValues(made.keys[0], made.values[0], 4)
    steps = [Rows([5], 9, [3, 1, 7]), Rows([6], 0, [9])]
    spans = [Rows([1, 2, 3], 0, [4]), Rows([7, 8], 6, [2, 11])]
    batch = PagedBatch.build(steps, spans, made, PLAIN)
    query = torch.randn(7, HEADS, 8)
    new = KeysValues(layer.keys[batch.write_slots[2:]], layer.values[batch.write_slots[2:]], 4)
    assert batch.steps is not None
    assert batch.spans is not None
    found = torch.cat(
        [
            PLAIN.steps(query[:2], layer, batch.steps, 8**-0.5, window),
            PLAIN.spans(query[2:], new, layer, batch.spans, 8**-0.5, window),
        ]
    )
    row = 0
    for part in [*steps, *spans]:
        slots = slots_of(part.blocks, 0, part.start + len(part.tokens), 4)
        rows = slice(row, row + len(part.tokens))
        torch.testing.assert_close(found[rows], by_hand(query[rows], layer.keys[slots], layer.values[slots], window))
        row = rows.stop


def test_windows_as_flash_attention_counts_them() -> None:
    assert _window_size(None) == (-1, 0)
    assert _window_size(48) == (47, 0)  # itself and the 47 before it


def test_a_trial_accepts_what_is_right_and_nothing_else() -> None:
    trial = Trial.like(pool(), HEADS)
    assert trial.accepts_steps(PLAIN.steps)
    assert trial.accepts_spans(PLAIN.spans)
    assert not trial.accepts_steps(lambda *asked: PLAIN.steps(*asked) + 0.1)
    assert not trial.accepts_spans(lambda *asked: PLAIN.spans(*asked).flip(0))

    def refuses(*_: object) -> torch.Tensor:
        raise RuntimeError("pages of 4 tokens")

    assert not trial.accepts_steps(refuses)
    assert not trial.accepts_spans(refuses)


def test_a_cpu_has_the_plain_kernels() -> None:
    assert choose_kernels(pool(), sms=132, query_heads=HEADS) is PLAIN


INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from tidelane.engine.model.attention_cuda import steps_one_by_one
from tidelane.engine.model.paged import KeysValues, Steps
from tidelane.engine.model.step_kernel import attend_steps

torch.manual_seed(0)
contexts = torch.tensor([1, 17, 700, 64, 256, 257])
blocks = torch.stack([torch.randperm(50)[:44] for _ in contexts]).int()
for heads, kv_heads, dim, value_dim, window, parts, dtype, within in [
    (4, 2, 16, 16, None, 1, torch.float32, 1e-5),
    (6, 2, 24, 16, None, 4, torch.float32, 1e-5),
    (6, 2, 24, 16, 300, 4, torch.float32, 1e-5),
    (8, 1, 64, 64, 20, 8, torch.float16, 2e-3),
    (8, 8, 32, 32, None, 2, torch.float16, 2e-3),
]:
    keys = torch.randn(800, kv_heads, dim).to(dtype)
    values = torch.randn(800, kv_heads, value_dim).to(dtype)
    query = torch.randn(len(contexts), heads, dim).to(dtype)
    found = attend_steps(query, keys, values, blocks, contexts, 16, dim**-0.5, window, parts)
    expected = steps_one_by_one(query, KeysValues(keys, values, 16), Steps(contexts, blocks), dim**-0.5, window)
    error = float((found - expected).abs().max())
    assert error < within, (heads, kv_heads, dim, window, parts, error)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tidelane.engine.model import step_kernel

def compiles(kernel, types, constants, capability):
    types = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature={n: types[n] for n in kernel.arg_names}, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]

floats, sizes = dict.fromkeys(("partial", "weights"), "*fp32"), dict(TILE=64, LEAST_TILES=4)
attend = {n: "i32" for n in ("window", "key_slot", "key_head", "value_slot", "value_head", "table_row")}
attend |= dict(blocks="*i32", contexts="*i64", scale="fp32") | floats
join = dict(contexts="*i64", window="i32") | floats
heads = dict(GROUP=4, GROUP_ROWS=16, DIM=128, DIM_ROWS=128, VALUE_DIM=128, VALUE_ROWS=128, BLOCK_TOKENS=16)
for capability in (80, 89, 90):
    for of in ("*bf16", "*fp32"):
        inputs = dict.fromkeys(("query", "keys", "values"), of)
        compiles(step_kernel._attend_part, attend | inputs, heads | sizes, capability)
        parts = dict(PARTS=8, VALUE_DIM=128, VALUE_ROWS=128)
        compiles(step_kernel._join_parts, join | {"out": of}, parts | sizes, capability)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["is right in the interpreter", "compiles for GPUs"])
def test_the_step_kernel(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_parts_keep_a_gpu_busy_and_long_contexts_short() -> None:
    from tidelane.engine.model.step_kernel import parts_for

    assert [parts_for(rows, 8, 132) for rows in (1, 4, 8, 256)] == [32, 16, 8, 8]
    assert parts_for(1, 8, 16) == 8
