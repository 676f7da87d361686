"""What an engine without a profile starts from: a few passes timed on each of its lanes, while it warms up."""

from __future__ import annotations

import threading
import time

import torch

from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.cores import CoreLane, CpuLanes
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel

# Tokens of the passes that are timed: one is bound by memory, the largest by arithmetic.
SIZES = (1, 8, 128)
# Attention's arithmetic runs at about this part of the speed of the linear layers on CPUs.
ATTENTION_SPEED = 0.3
# Lanes on cores share memory bandwidth and the last-level cache more than lanes of SMs do.
CPU_CONTENTION = Contention(decode_slowdown=1.2, prefill_slowdown=1.1, guard=1.3)


def calibrate(model: SlicedModel, pool: DevicePool, lanes: CpuLanes) -> Estimates:
    """Warm up every lane and time it. Checks first that slicing the model by layers changes nothing.

    Raises BadModel if the model's output is not what its own forward gives.
    """
    _check(model, pool)
    batches = _batches(pool)
    pair_share = _pair_share(model, pool)
    decode = {n: _timed(lane, model, batches, pair_share) for n, lane in lanes.decode_lanes.items()}
    prefill = {n: _timed(lane, model, batches, pair_share) for n, lane in lanes.prefill_lanes.items()}
    whole = {lanes.table.units: decode[lanes.table.units]}
    return Estimates({Phase.DECODE: decode, Phase.PREFILL: prefill, Phase.FUSED: whole}, CPU_CONTENTION)


def warm_up(model: SlicedModel, pool: DevicePool, lanes: CpuLanes) -> None:
    """The same, for an engine that knows its times: the first call on each lane is slow, and no request should meet it.

    Raises BadModel if the model's output is not what its own forward gives.
    """
    _check(model, pool)
    batches = _batches(pool)
    for lane in {*lanes.decode_lanes.values(), *lanes.prefill_lanes.values()}:
        _seconds(lane, model, batches)


def _check(model: SlicedModel, pool: DevicePool) -> None:
    with torch.inference_mode():
        model.check(RaggedBatch.build([Rows(range(pool.layout.block_tokens), 0, [0])], pool))


def _batches(pool: DevicePool) -> list[RaggedBatch]:
    slots = pool.keys[0].shape[0]
    sizes = [size for size in SIZES if size <= slots]
    blocks = list(range(-(-sizes[-1] // pool.layout.block_tokens)))
    return [RaggedBatch.build([Rows([0] * size, 0, blocks)], pool) for size in sizes]


def _timed(lane: CoreLane, model: SlicedModel, batches: list[RaggedBatch], pair_share: float) -> PassTimes:
    # A team's first call is slow: each batch goes through twice, and the second time counts.
    seconds = _seconds(lane, model, [batch for batch in batches for _ in range(2)])[1::2]
    tokens = tuple(len(batch.tokens) for batch in batches)
    line = tuple(max(seconds[: i + 1]) for i in range(len(seconds)))
    token_s = line[-1] / tokens[-1]
    # A decoding sequence reads its KV once for all its queries: one pair for each token of context.
    return PassTimes(tokens, line, pair_s=token_s * pair_share, context_s=token_s * pair_share)


def _seconds(lane: CoreLane, model: SlicedModel, batches: list[RaggedBatch]) -> list[float]:
    """How long each batch took, in order."""
    seconds: list[float] = []
    done = threading.Event()

    def work() -> None:
        for batch in batches:
            begun_s = time.monotonic()
            model.run_whole(batch)
            seconds.append(time.monotonic() - begun_s)
        done.set()

    lane.submit(work)
    done.wait()
    return seconds


def _pair_share(model: SlicedModel, pool: DevicePool) -> float:
    """What attention between one query and one key costs, of what a token costs in the linear layers."""
    layout = pool.layout
    pair_flops = 2 * layout.layers * model.query_heads * (layout.key_dim + layout.value_dim)
    return pair_flops / (2 * model.linear_weights) / ATTENTION_SPEED
