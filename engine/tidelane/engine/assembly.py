"""Putting an engine together: model, memory, lanes, policies, loop."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

import psutil
import torch

from tidelane.engine.channel import Endpoint, Facts, ToFront, ToLoop
from tidelane.engine.config import ServeConfig
from tidelane.engine.control import ControlRoom
from tidelane.engine.desk import ChannelDesk
from tidelane.engine.errors import CannotServe
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.cores import CpuLanes, leave_compute_to_lanes
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.model.store import resolve
from tidelane.engine.reports import scheduling_objective
from tidelane.engine.scheduling.lanes import LanesScheduler
from tidelane.engine.scheduling.mixed import MixedScheduler
from tidelane.engine.scheduling.plan import Scheduler
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.usage import Usage
from tidelane.engine.wakeup import Wakeup
from tidelane.engine.window import LatencyWindow
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import ExecutionMode

_log = logging.getLogger(__name__)

# Of the memory that is free once the weights are loaded, how much KV may take on a machine that others use too.
KV_SHARE_OF_FREE_MEMORY = 0.25
KV_DEFAULT_MOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Engine:
    loop: Loop
    ledger: Ledger
    executor: CpuExecutor
    desk: ChannelDesk
    front_facts: Facts


def assemble(
    config: ServeConfig,
    room: ControlRoom,
    wakeup: Wakeup,
    endpoint: Endpoint[ToFront, ToLoop],
    identity: serving_pb2.EngineStatus,
) -> Engine:
    """Load the model and wire everything. Raises CannotServe when it can never run as asked."""
    leave_compute_to_lanes()
    cores = config.cores or tuple(sorted(os.sched_getaffinity(0)))
    folder = resolve(config.model, config.model_store, _log.info)
    loaded = load(folder, config.dtype, config.max_context_tokens, torch.device("cpu"))
    model = SlicedModel(loaded.module)
    pool = _allocate_pool(config, loaded)
    lanes = CpuLanes(cores, partition_table(len(cores)))
    warm_up(model, pool, lanes)

    window = LatencyWindow(time.monotonic)
    policies: dict[str, Scheduler] = {
        ExecutionMode.LANES: LanesScheduler(),
        ExecutionMode.MIXED_BATCH: MixedScheduler(),
    }

    def ended(timeline: Timeline | None, slo: Slo) -> None:
        window.add(timeline, slo)
        if timeline is not None:
            policies[room.objective.mode].request_ended(timeline, slo)

    layout = loaded.facts.kv_layout
    blocks = pool.keys[0].shape[0] // layout.block_tokens
    ledger = Ledger(
        table=lanes.table,
        layers=model.layers,
        block_tokens=layout.block_tokens,
        blocks=blocks,
        queue_limit=config.queue_limit,
        objective=scheduling_objective(room.objective),
        ended=ended,
    )
    executor = CpuExecutor(model, pool, lanes, ledger.sequences, wakeup.notify)
    usage = Usage(lanes.table.units, time.monotonic())
    identity.model_digest = loaded.facts.digest
    desk = ChannelDesk(endpoint, wakeup, room, ledger, usage, window, identity)
    loop = Loop(ledger=ledger, policies=policies, executor=executor, desk=desk, usage=usage, clock=time.monotonic)
    facts = Facts(
        served_name=config.served_name,
        model_folder=str(folder),
        max_context_tokens=loaded.facts.max_context_tokens,
        kv_pool_tokens=blocks * layout.block_tokens,
        vocab_size=loaded.facts.vocab_size,
        stop_token_ids=loaded.facts.stop_token_ids,
        queue_limit=config.queue_limit,
    )
    return Engine(loop, ledger, executor, desk, facts)


def _allocate_pool(config: ServeConfig, loaded: LoadedModel) -> DevicePool:
    layout = loaded.facts.kv_layout
    free_bytes = psutil.virtual_memory().available
    size = config.kv_pool_bytes or min(KV_DEFAULT_MOST_BYTES, int(free_bytes * KV_SHARE_OF_FREE_MEMORY))
    if size > free_bytes:
        raise CannotServe(
            f"a KV pool of {size} bytes does not fit: {free_bytes} bytes of memory are free; ask for less"
        )
    if layout.blocks_in(size) < 1:
        raise CannotServe(
            f"a KV pool of {size} bytes is too small: this model's KV of {layout.block_tokens} tokens, the least that "
            f"can be held, takes {layout.block_bytes} bytes"
        )
    return DevicePool.allocate(layout, layout.blocks_in(size), loaded.facts.dtype, torch.device("cpu"))


def warm_up(model: SlicedModel, pool: DevicePool, lanes: CpuLanes) -> None:
    """First calls are slow, on every lane; and the check that slicing changes nothing belongs before serving."""
    block_tokens = pool.layout.block_tokens
    with torch.inference_mode():
        model.check(RaggedBatch.build([Rows(range(block_tokens), 0, [0])], pool))
    one_token = RaggedBatch.build([Rows([0], 0, [0])], pool)

    def step() -> None:
        model.run_whole(one_token)

    lanes.warm(step)
