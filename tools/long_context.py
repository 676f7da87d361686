"""A context far larger than the device's pool, streamed through it: is it right, and what does a token cost?

    python -m tools.long_context --tokens 1048576 --json long-context.json

A model of one layer, two query heads of 16 numbers and one KV head, with random weights and RoPE: prefill takes time
with the square of the tokens, and that is to be minutes. The prompt is random; one token, whose key is the longest of
all, stands in it once, at a random depth: the needle. After prefill and some decode steps two queries go through the
same parts as those of the model: one along the needle's key, of a length that gives it nine tenths of the attention,
and one so short that all keys count about alike. Both are compared with a softmax over all keys in float64, read from
host memory as it lies.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tools.live.rig import one_or_more, refusing, write_measurement
from transformers import LlamaConfig, LlamaForCausalLM

from tidelane.cli.targets import BadOption
from tidelane.cli.traces import check_outputs
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.kv.streaming import StreamedContext
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.model import attention
from tidelane.engine.model.attention_parts import Attended, attend_part
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.streamed import StreamedModel

QUERY_HEADS = 2
HEAD_DIM = 16
ROPE_THETA = 5e5  # Llama 3's
VOCAB = 256
NEEDLE = 0  # a token of its own: the others are 1 and on
LEAST_TOKENS = 2048
POOL_SHARE = 128  # a part, and a chunk, is one in so many of the tokens
LEAST_PART_TOKENS = 64
NEEDLE_WEIGHT = 0.9
HALVINGS = 60
MEMCPY_BYTES = 256 << 20
MEMCPY_ROUNDS = 5
EXACT_TOKENS = 65536  # at once, in float64


@dataclass(frozen=True, slots=True)
class Compared:
    """Largest differences of an attention output from float64's, and float64's largest number."""

    largest_error: float
    largest_value: float


@dataclass(frozen=True, slots=True)
class Figures:
    tokens: int
    layers: int
    new_tokens: int
    part_tokens: int
    pool_tokens: int
    pool_share: float
    kv_bytes: int
    pool_bytes: int
    needle_depth: float  # 0: the first token
    needle_weight: float  # by float64
    needle: Compared
    diffuse: Compared
    all_finite: bool
    prefill_s: float
    prefill_pairs_per_s: float  # query heads times pairs of a query and a key that it sees
    decode_ms: float  # median
    bytes_per_step: int  # of KV in host memory, each read once
    memcpy_gb_per_s: float
    floor_ms: float  # those bytes at that rate
    decode_over_floor: float
    peak_before_bytes: int  # of the process, once torch and the model are there
    peak_bytes: int


class Rig:
    """The model, its context and what they were made of."""

    def __init__(self, tokens: int, new_tokens: int, layers: int, seed: int) -> None:
        torch.manual_seed(seed)
        attention.register()
        shape: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": QUERY_HEADS * HEAD_DIM,
            "intermediate_size": 2 * QUERY_HEADS * HEAD_DIM,
            "num_hidden_layers": layers,
            "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": tokens + new_tokens,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "initializer_range": 0.2,
            "attn_implementation": attention.NAME,
        }
        llama: Any = LlamaForCausalLM(LlamaConfig(**shape))
        llama.eval()
        _make_longest_key(llama)
        self.layout = KVLayout(layers=layers, heads=1, key_dim=HEAD_DIM, value_dim=HEAD_DIM, element_bytes=4)
        part_blocks = self.layout.blocks_for(max(LEAST_PART_TOKENS, tokens // POOL_SHARE))
        self.part_tokens = part_blocks * self.layout.block_tokens
        self.blocks = StreamRun(0, part_blocks, part_blocks + 1)
        self.pool = DevicePool.allocate(self.layout, self.blocks.count, torch.float32, torch.device("cpu"))
        slots = self.layout.blocks_for(tokens + new_tokens)
        self.host = HostMemory.allocate(self.layout, slots)
        # In any order, as the books of an engine leave them.
        order = torch.randperm(slots).tolist()
        self.context = StreamedContext(self.pool, self.host, self.blocks, order, Traffic())
        self.model = StreamedModel(SlicedModel(llama), self.context)


@torch.inference_mode()
def _make_longest_key(llama: Any) -> None:
    """Change the needle's embedding so that no token has a longer key in the first layer.

    The norm before the layer leaves every input the same length, so the key is longest along the first right singular
    vector of the projection. RoPE turns keys and keeps their length.
    """
    embedding, projection = llama.model.embed_tokens.weight, llama.model.layers[0].self_attn.k_proj.weight
    _, _, right = torch.linalg.svd(projection)
    embedding[NEEDLE] = right[0] * embedding.norm(dim=1).mean()


def measure(tokens: int, new_tokens: int, layers: int, seed: int, tell: Console) -> Figures:
    peak_before = _peak_bytes()
    rig = Rig(tokens, new_tokens, layers, seed)
    chance = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, VOCAB, (tokens,), generator=chance)
    needle_at = int(torch.randint(0, tokens, (1,), generator=chance))
    prompt[needle_at] = NEEDLE
    try:
        prefill_s, logits = _prefill(rig, prompt.tolist(), tell)
        steps, finite = [], bool(logits.isfinite().all())
        floors = []
        for _ in range(new_tokens):
            token = 1 + int(logits[1:].argmax())  # never the needle: it stands once
            floors.append(rig.context.stored * rig.layout.token_bytes)
            begun = time.perf_counter()
            logits = rig.model.run([token])
            steps.append(time.perf_counter() - begun)
            finite = finite and bool(logits.isfinite().all())
        peak = _peak_bytes()  # of what was asked: the comparisons hold all keys at once
        rate = _memcpy_bytes_per_s()
        keys, values = _as_it_lies(rig)
        needle_query, diffuse_query = _queries(keys, needle_at, chance)
        weight, exact = _exact(needle_query, keys, values, needle_at)
        needle = _compared(_streamed(rig, needle_query), exact)
        diffuse = _compared(_streamed(rig, diffuse_query), _exact(diffuse_query, keys, values, needle_at)[1])
    finally:
        rig.context.close()
    moved = int(statistics.median(floors))
    pairs = layers * QUERY_HEADS * tokens * (tokens + 1) // 2
    pool_tokens = rig.blocks.count * rig.layout.block_tokens
    return Figures(
        tokens=tokens,
        layers=layers,
        new_tokens=new_tokens,
        part_tokens=rig.part_tokens,
        pool_tokens=pool_tokens,
        pool_share=pool_tokens / tokens,
        kv_bytes=rig.host.memory.numel(),
        pool_bytes=rig.blocks.count * rig.layout.block_bytes,
        needle_depth=needle_at / tokens,
        needle_weight=weight,
        needle=needle,
        diffuse=diffuse,
        all_finite=finite,
        prefill_s=prefill_s,
        prefill_pairs_per_s=pairs / prefill_s,
        decode_ms=statistics.median(steps) * 1e3,
        bytes_per_step=moved,
        memcpy_gb_per_s=rate / 1e9,
        floor_ms=moved / rate * 1e3,
        decode_over_floor=statistics.median(steps) / (moved / rate),
        peak_before_bytes=peak_before,
        peak_bytes=peak,
    )


def _prefill(rig: Rig, prompt: Sequence[int], tell: Console) -> tuple[float, torch.Tensor]:
    """Seconds, and the logits of the last token."""
    begun, tenth = time.perf_counter(), 1
    logits = torch.empty(0)
    for at in range(0, len(prompt), rig.part_tokens):
        logits = rig.model.run(prompt[at : at + rig.part_tokens])
        if rig.context.length >= tenth * len(prompt) / 10:
            tell.print(f"prefill: {rig.context.length:,} tokens, {time.perf_counter() - begun:.0f} s")
            tenth += 1
    return time.perf_counter() - begun, logits


def _memcpy_bytes_per_s() -> float:
    """One thread's, as the copies of parts are."""
    source = torch.ones(MEMCPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    for _ in range(MEMCPY_ROUNDS):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    torch.set_num_threads(before)
    return MEMCPY_BYTES / statistics.median(times)


# ---- the first layer, exactly ----------------------------------------------------------------------------------------


def _as_it_lies(rig: Rig) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first layer [tokens, dim], in order, not by way of the parts."""
    layer = rig.host.memory[:, 0].view(torch.float32)[rig.context.stored_slots]
    keys, values = layer.view(len(layer), 2, rig.layout.block_tokens, HEAD_DIM).unbind(1)
    left = rig.context.own(0, 0)
    return (
        torch.cat([keys.reshape(-1, HEAD_DIM), left.keys[:, 0]]),
        torch.cat([values.reshape(-1, HEAD_DIM), left.values[:, 0]]),
    )


def _queries(keys: torch.Tensor, needle_at: int, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[dim] each. The first is so long that the needle has NEEDLE_WEIGHT of the attention, the other keys the rest."""
    needle, norms = keys[needle_at], keys.norm(dim=1)
    diffuse = torch.randn(HEAD_DIM, generator=chance) / norms.max()
    norms[needle_at] = 0.0
    if needle.norm() <= norms.max():
        raise RuntimeError("the needle's key is not the longest: this comparison would show nothing")
    # By Cauchy and Schwarz' inequality no other key has the needle's score, so its weight grows with the query.
    scores = (keys @ needle).double() * HEAD_DIM**-0.5
    shortest, longest = 0.0, 1e6
    for _ in range(HALVINGS):
        length = (shortest + longest) / 2
        enough = (scores * length).softmax(0)[needle_at] >= NEEDLE_WEIGHT
        shortest, longest = (shortest, length) if enough else (length, longest)
    return needle * longest, diffuse


def _streamed(rig: Rig, query: torch.Tensor) -> torch.Tensor:
    """[dim], of a query that stands after the context: through the parts and the merge that the model's go through."""
    heads, scale, start = query.view(1, 1, HEAD_DIM), HEAD_DIM**-0.5, rig.context.length
    own = rig.context.own(0, 0)
    parts = itertools.chain([own] if own.end > own.first else [], rig.context.parts(0, 0))
    attended = (attend_part(heads, start, part, scale, None) for part in parts)
    return reduce(Attended.merged, attended).out.view(-1)


def _exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, needle_at: int) -> tuple[float, torch.Tensor]:
    """The needle's weight, and the output [dim], by a softmax over all keys in float64."""
    scores = torch.cat([part.double() @ query.double() for part in torch.split(keys, EXACT_TOKENS)]) * HEAD_DIM**-0.5
    weights = scores.softmax(0)
    pieces = zip(torch.split(weights, EXACT_TOKENS), torch.split(values, EXACT_TOKENS), strict=True)
    return float(weights[needle_at]), sum((part @ value.double() for part, value in pieces), torch.zeros(HEAD_DIM))


def _compared(streamed: torch.Tensor, exact: torch.Tensor) -> Compared:
    return Compared(float((streamed.double() - exact).abs().max()), float(exact.abs().max()))


# ---- told ------------------------------------------------------------------------------------------------------------


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _show(figures: Figures, console: Console) -> None:
    mib = 1 << 20
    table = Table(title=f"{figures.tokens:,} tokens through a pool of {figures.pool_tokens:,}", show_header=False)
    rows = {
        "pool / KV": f"{figures.pool_share:.1%} ({figures.pool_bytes / mib:.1f} of {figures.kv_bytes / mib:.0f} MiB)",
        "all logits finite": "yes" if figures.all_finite else "NO",
        f"needle at {figures.needle_depth:.1%}, weight {figures.needle_weight:.4f}": _error(figures.needle),
        "diffuse query": _error(figures.diffuse),
        "prefill": f"{figures.prefill_s:.1f} s, {figures.prefill_pairs_per_s / 1e9:.2f} G pairs/s",
        "decode": f"{figures.decode_ms:.2f} ms a token, {figures.decode_over_floor:.2f} times the floor",
        "floor": f"{figures.floor_ms:.2f} ms: {figures.bytes_per_step / mib:.0f} MiB at "
        f"{figures.memcpy_gb_per_s:.2f} GB/s, one thread's memcpy",
        "peak memory": f"{figures.peak_bytes / mib:.0f} MiB, {figures.peak_before_bytes / mib:.0f} before",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _error(compared: Compared) -> str:
    return f"largest error {compared.largest_error:.1e}, of {compared.largest_value:.2e}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.long_context", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=one_or_more, default=1 << 20, help="of the prompt (default 1048576)")
    parser.add_argument("--new-tokens", type=one_or_more, default=24, help="decode steps after it (default 24)")
    parser.add_argument("--layers", type=one_or_more, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    if options.tokens < LEAST_TOKENS:
        raise BadOption(f"--tokens: {options.tokens} would fit the pool: make it {LEAST_TOKENS} or more")
    check_outputs(options.json, None)
    console = Console()
    figures = measure(options.tokens, options.new_tokens, options.layers, options.seed, console)
    _show(figures, console)
    if options.json is not None:
        write_measurement(options.json, {"load_average": os.getloadavg()[0], **asdict(figures)})
    return 0


if __name__ == "__main__":
    sys.exit(refusing(main))
