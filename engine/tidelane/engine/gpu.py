"""Putting the parts of an engine on a GPU together, before it has anyone to serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch

from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.estimation.profile import ProfileKey
from tidelane.engine.execution.cuda import CudaExecutor, CudaGpu
from tidelane.engine.execution.graphs import MOST_ROWS, DecodeSteps, StepBuffers, buckets
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.lanes.green import StreamLanes, open_lanes
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.model.attention_cuda import choose_kernels
from tidelane.engine.model.batch import Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import ModelFacts
from tidelane.engine.model.paged import Kernels, PagedBatch
from tidelane.engine.profiling.probes import Probe
from tidelane.engine.profiling.stand import Stand
from tidelane.engine.sequence import Sequence

_log = logging.getLogger(__name__)

# Of the memory that the weights leave free. The rest is for activations, graphs, workspaces, and the contexts.
KV_SHARE_OF_FREE_MEMORY = 0.8
LOGITS_SHARE_OF_FREE_MEMORY = 0.05
# What lanes of SMs cost each other, until it is measured: MuxWise saw 20 % on an A100 and 30 % on an H100.
GPU_CONTENTION = Contention(decode_slowdown=1.15, prefill_slowdown=1.05, guard=1.3)
# What is timed at the start, on each lane.
STEP_BATCHES = (1, 16, 64, 256)
STEP_CONTEXT = 48
LONG_CONTEXT = 2048
PASS_TOKENS = (64, 512, 4096)


@dataclass(frozen=True, slots=True)
class GpuParts:
    """`pool` has one block more than `blocks`: rows of a step that nobody needs write there."""

    model: SlicedModel
    pool: DevicePool
    kernels: Kernels
    lanes: StreamLanes
    steps: DecodeSteps
    blocks: int
    vocab_size: int

    def close(self) -> None:
        """Once nothing runs any more."""
        self.steps.drop_graphs()
        self.lanes.close()


def open_gpu(
    module: Any,
    layout: KVLayout,
    *,
    device: torch.device,
    vocab_size: int,
    most_tokens: int,
    kv_pool_bytes: int | None = None,
    most_rows: int = MOST_ROWS,
) -> GpuParts:
    """Lanes, memory and graphs for `module`, a transformers model that is on `device`. `most_tokens` of one sequence.

    Raises CannotServe if the KV pool does not fit, BadModel if the model's output is not what its own forward gives.
    """
    torch.cuda.set_device(device)
    lanes = open_lanes(device)
    model = SlicedModel(module)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    blocks = kv_blocks(layout, free_bytes, kv_pool_bytes)
    pool = DevicePool.allocate(layout, blocks + 1, module.dtype, device)
    kernels = choose_kernels(pool, lanes.table.units, model.query_heads)
    with torch.inference_mode():
        model.check(PagedBatch.build([], [Rows(range(layout.block_tokens), 0, [blocks])], pool, kernels))
    rows = step_rows(most_rows, vocab_size, 1 + len(lanes.decode_lanes), free_bytes)
    steps = DecodeSteps(model, pool, kernels, StepBuffers(pool, rows, most_tokens, vocab_size), buckets(rows))
    parts = GpuParts(model, pool, kernels, lanes, steps, blocks, vocab_size)
    torch.cuda.synchronize(device)  # zeros and weights were ordered on another stream than the lanes'
    if kernels.captures:
        _capture(parts)
    return parts


def kv_blocks(layout: KVLayout, free_bytes: int, asked_bytes: int | None) -> int:
    """How many blocks sequences get. Raises CannotServe when that is none, or does not fit."""
    size = asked_bytes or int(free_bytes * KV_SHARE_OF_FREE_MEMORY)
    if size > free_bytes:
        raise CannotServe(f"a KV pool of {size} bytes does not fit: {free_bytes} bytes of the GPU's memory are free")
    blocks = layout.blocks_in(size) - 1  # one is nobody's
    if blocks < 1:
        raise CannotServe(
            f"a KV pool of {size} bytes is too small: two blocks of {layout.block_bytes} bytes are needed"
        )
    return blocks


def step_rows(most: int, vocab_size: int, lanes: int, free_bytes: int) -> int:
    """How many rows the largest graph has: each lane's keeps logits for all of its rows, in two dtypes."""
    affordable = int(LOGITS_SHARE_OF_FREE_MEMORY * free_bytes) // (lanes * vocab_size * 6)
    return max(1, min(most, affordable))


def _capture(parts: GpuParts) -> None:
    lanes = {**parts.lanes.decode_lanes, parts.lanes.table.units: parts.lanes.whole}
    try:
        with torch.inference_mode():
            parts.steps.capture(lanes)
    except RuntimeError as error:
        # Some models ask the device for a number on the way, which no graph can hold. Slower, not wrong.
        parts.steps.drop_graphs()
        _log.warning("decode goes without graphs: %s", error)


def gpu_key(facts: ModelFacts, device: torch.device, units: int) -> ProfileKey:
    return ProfileKey(
        weights_digest=facts.digest,
        device=torch.cuda.get_device_name(device),
        units=units,
        dtype=str(facts.dtype).removeprefix("torch."),
        layers=facts.layers,
    )


def cuda_executor(
    parts: GpuParts,
    sequences: Mapping[str, Sequence],
    notify: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> CudaExecutor:
    return CudaExecutor(
        gpu=CudaGpu(parts.pool.keys[0].device),
        model=parts.model,
        pool=parts.pool,
        kernels=parts.kernels,
        lanes=parts.lanes,
        steps=parts.steps,
        sequences=sequences,
        notify=notify,
        clock=clock,
    )


# ---- where predictions start without a profile -----------------------------------------------------------------------


def calibrate_gpu(parts: GpuParts, most_tokens: int) -> Estimates:
    """Warm up every lane and time a few passes on it."""
    sequences: dict[str, Sequence] = {}
    ended = Event()

    def wait() -> None:
        ended.wait()
        ended.clear()

    executor = cuda_executor(parts, sequences, ended.set)
    block_tokens = parts.pool.layout.block_tokens
    stand = Stand(
        executor,
        sequences,
        wait,
        layers=parts.model.layers,
        block_tokens=block_tokens,
        vocab_size=parts.vocab_size,
    )
    try:
        return first_estimates(
            lambda probe: stand.seconds(probe),
            parts.lanes.table.splits,
            parts.lanes.table.whole,
            room=min(most_tokens - 1, parts.blocks * block_tokens - 1),
            most_rows=parts.steps.sizes[-1],
        )
    finally:
        executor.close()


def first_estimates(
    seconds: Callable[[Probe], float], splits: tuple[Partition, ...], whole: Partition, *, room: int, most_rows: int
) -> Estimates:
    """From what probes take. `room`: the tokens that one sequence, and all of a probe's together, may have."""
    rows = (*splits, whole)
    decode = {row.decode_units: _step_times(seconds, row, room, most_rows) for row in rows}
    prefill = {row.prefill_units: _pass_times(seconds, row, room) for row in rows}
    return Estimates({Phase.DECODE: decode, Phase.PREFILL: prefill}, GPU_CONTENTION)


def _step_times(seconds: Callable[[Probe], float], row: Partition, room: int, most_rows: int) -> PassTimes:
    context = max(1, min(STEP_CONTEXT, room // 2))
    fitting = [n for n in STEP_BATCHES if n <= most_rows and n * (context + 16) <= room] or [1]
    line = [_twice(seconds, Probe(row, contexts=(context,) * n)) for n in fitting]
    long, batch = min(LONG_CONTEXT, room // fitting[-1] - 16), fitting[-1]
    context_s = 0.0
    if long > 2 * context:
        more_s = _twice(seconds, Probe(row, contexts=(long,) * batch)) - line[-1]
        context_s = max(0.0, more_s / (batch * (long - context)))
    flat = [each - n * context * context_s for n, each in zip(fitting, line, strict=True)]
    return PassTimes(tuple(fitting), _rising(flat), context_s=context_s)


def _pass_times(seconds: Callable[[Probe], float], row: Partition, room: int) -> PassTimes:
    fitting = [n for n in PASS_TOKENS if n <= room] or [room]
    line = [_twice(seconds, Probe(row, spans=((0, n),))) for n in fitting]
    pair_s, last = 0.0, fitting[-1]
    if last >= 2 and room >= 2 * last:
        more_s = _twice(seconds, Probe(row, spans=((last, 2 * last),))) - line[-1]
        pair_s = max(0.0, more_s / (last * last))
    flat = [each - pair_s * n * (n + 1) / 2 for n, each in zip(fitting, line, strict=True)]
    return PassTimes(tuple(fitting), _rising(flat), pair_s=pair_s)


def _twice(seconds: Callable[[Probe], float], probe: Probe) -> float:
    """The second time: the first of its size may load kernels and ask for memory."""
    seconds(probe)
    return seconds(probe)


def _rising(line: list[float]) -> tuple[float, ...]:
    highest = 1e-6  # of a microsecond, at the least: what is left of a difference may be noise
    rising = []
    for each in line:
        highest = max(highest, each)
        rising.append(highest)
    return tuple(rising)
