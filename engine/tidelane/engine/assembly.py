"""Putting an engine together: model, memory, lanes, policies, loop."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import torch

from tidelane.engine.channel import Endpoint, Facts, ToFront, ToLoop
from tidelane.engine.config import ComputeConfig, ServeConfig
from tidelane.engine.control import ControlRoom
from tidelane.engine.desk import ChannelDesk
from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Estimates
from tidelane.engine.estimation.profile import ProfileKey
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.execution.executor import Executor
from tidelane.engine.execution.starting import find_profile, profile_key, starting_estimates
from tidelane.engine.gpu import calibrate_gpu, cuda_executor, gpu_key, open_gpu
from tidelane.engine.handover.opening import Cores, open_sides
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.moves import Mover
from tidelane.engine.kv.retention import IDLE_TIMEOUT_S, ByServiceTier
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.lanes.cores import CpuLanes, leave_compute_to_lanes
from tidelane.engine.lanes.green import widen_queues
from tidelane.engine.lanes.partition import PartitionTable, partition_table
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import LoadedModel, kv_namespace, load
from tidelane.engine.model.store import resolve
from tidelane.engine.prefetch import NoLookAhead, Prefetcher
from tidelane.engine.reports import scheduling_objective
from tidelane.engine.scheduling.plan import Scheduler
from tidelane.engine.scheduling.policies import apart_policies, live_policies
from tidelane.engine.sequence import Sequence
from tidelane.engine.tiers import Below, open_below
from tidelane.engine.usage import Usage
from tidelane.engine.wakeup import Wakeup
from tidelane.engine.window import LatencyWindow
from tidelane.engine.workload_report import WorkloadReport
from tidelane.engine.workload_window import WorkloadWindow
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
    executor: Executor
    mover: Mover
    desk: ChannelDesk
    front_facts: Facts


@dataclass(frozen=True, slots=True)
class Parts:
    """What computes, before anything is asked of it."""

    folder: Path
    loaded: LoadedModel
    model: SlicedModel
    pool: DevicePool
    lanes: CpuLanes


@dataclass(frozen=True, slots=True)
class _Compute:
    """A model ready to run on one device; `executor` of the loop's sequences, and what to call after a completion."""

    folder: Path
    loaded: LoadedModel
    layers: int
    blocks: int
    table: PartitionTable
    policies: Mapping[str, Scheduler]
    estimates: Estimates
    # Under which a profile of it would be kept; None: it is two processes, which no profile tells of.
    key: ProfileKey | None
    executor: Callable[[Mapping[str, Sequence], Callable[[], None]], Executor]
    # Whether a prompt may begin with blocks that another has computed.
    shares: bool = True
    below: Below = field(default_factory=Below)

    @property
    def stream_run(self) -> StreamRun | None:
        """What a context larger than the pool streams through; None: none can."""
        return None if self.below.host is None else StreamRun.at_end_of(self.blocks)


def load_parts(config: ComputeConfig) -> Parts:
    """Raises CannotServe when they can never run as asked. The calling thread computes with one thread from then on."""
    leave_compute_to_lanes()
    cores = config.cores or tuple(sorted(os.sched_getaffinity(0)))
    folder = resolve(config.model, config.model_store, _log.info)
    loaded = load(folder, config.dtype, config.max_context_tokens, torch.device("cpu"))
    layout = loaded.facts.kv_layout
    blocks = _pool_blocks(config, layout, psutil.virtual_memory().available)
    pool = DevicePool.allocate(layout, blocks, loaded.facts.dtype, torch.device("cpu"))
    lanes = CpuLanes(cores, partition_table(len(cores)))
    return Parts(folder, loaded, SlicedModel(loaded.module), pool, lanes)


def assemble(
    config: ServeConfig,
    room: ControlRoom,
    wakeup: Wakeup,
    endpoint: Endpoint[ToFront, ToLoop],
    identity: serving_pb2.EngineStatus,
) -> Engine:
    """Load the model and wire everything. Raises CannotServe when it can never run as asked."""
    compute = _compute(config, wakeup.notify)
    fetch_s = compute.below.fetch_times().seconds
    loaded = compute.loaded
    window = LatencyWindow(time.monotonic)
    layout = loaded.facts.kv_layout
    ledger = Ledger(
        table=compute.table,
        layers=compute.layers,
        block_tokens=layout.block_tokens,
        blocks=compute.blocks,
        queue_limit=config.queue_limit,
        objective=scheduling_objective(room.objective),
        estimates=compute.estimates,
        ended=window.add,
        retention=lambda: ByServiceTier(config.kv_idle_timeout_s or IDLE_TIMEOUT_S, time.monotonic),
        names=TokenNames(kv_namespace(loaded.facts), layout.block_tokens) if compute.shares else None,
        host_slots=compute.below.host_slots,
        disk_slots=compute.below.disk_slots,
        fetch_s=fetch_s,
        look_ahead=partial(Prefetcher, fetch_s=fetch_s, clock=time.monotonic) if config.kv_prefetch else NoLookAhead,
        stream_run=compute.stream_run,
        read_s=compute.below.read_times().seconds,
    )
    ledger.pool.disk.restore(compute.below.left)
    executor = compute.executor(ledger.sequences, wakeup.notify)
    usage = Usage(compute.table.units, time.monotonic())
    identity.model_digest = loaded.facts.digest
    workload = WorkloadReport(
        WorkloadWindow(time.monotonic),
        compute.key,
        compute.table,
        layout.block_tokens,
        compute.blocks * layout.block_tokens,
    )
    desk = ChannelDesk(endpoint, wakeup, room, ledger, usage, compute.below.traffic, window, identity, workload)
    policies = compute.policies
    loop = Loop(
        ledger=ledger,
        policies=policies,
        executor=executor,
        mover=compute.below.mover,
        desk=desk,
        usage=usage,
        clock=time.monotonic,
    )
    facts = Facts(
        served_name=config.served_name,
        model_folder=str(compute.folder),
        max_context_tokens=loaded.facts.max_context_tokens,
        kv_pool_tokens=ledger.streams.resident_blocks * layout.block_tokens,
        kv_stream_tokens=ledger.streams.most_tokens,
        vocab_size=loaded.facts.vocab_size,
        stop_token_ids=loaded.facts.stop_token_ids,
        queue_limit=config.queue_limit,
    )
    return Engine(loop, ledger, executor, compute.below.mover, desk, facts)


def _compute(config: ServeConfig, notify: Callable[[], None]) -> _Compute:
    gpu = _wants_gpu(config)
    if config.objective.mode is ExecutionMode.DISAGGREGATED:
        if gpu:
            raise CannotServe("execution mode Disaggregated runs on CPU cores only, so far: name some with --cores")
        return _apart(config, notify)
    return _on_gpu(config) if gpu else _on_cpu(config, notify)


def _wants_gpu(config: ServeConfig) -> bool:
    widen_queues(os.environ)  # before torch asks the driver anything
    if config.device == "auto":
        return not config.cores and torch.cuda.is_available()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise CannotServe("device cuda: torch sees no GPU on this machine")
    return config.device == "cuda"


def _on_cpu(config: ServeConfig, notify: Callable[[], None]) -> _Compute:
    parts = load_parts(config)
    model, pool, lanes = parts.model, parts.pool, parts.lanes
    estimates = starting_estimates(model, pool, lanes, parts.loaded.facts, config)
    below = open_below(config, parts.loaded.facts, pool, notify)
    streams_from = None if below.host is None else (below.host, below.traffic)
    executor = partial(CpuExecutor, model, pool, lanes, below=streams_from)
    policies = live_policies(lanes.table)
    return _Compute(
        parts.folder,
        parts.loaded,
        model.layers,
        pool.blocks,
        lanes.table,
        policies,
        estimates,
        profile_key(parts.loaded.facts, lanes),
        executor,
        below=below,
    )


def _apart(config: ServeConfig, notify: Callable[[], None]) -> _Compute:
    """Decode here, prefill in a child process, each on cores of its own."""
    if config.kv_host_bytes or config.kv_disk_bytes or config.kv_idle_timeout_s is not None:
        raise CannotServe(
            "execution mode Disaggregated keeps no KV for later prompts: "
            "leave out --kv-host-memory, --kv-disk-memory and --kv-idle-timeout"
        )
    cores = Cores.split(config.cores or tuple(sorted(os.sched_getaffinity(0))))
    if config.profile is not None:
        raise CannotServe("execution mode Disaggregated times its two processes itself: start it without --profile")
    leave_compute_to_lanes()
    folder = resolve(config.model, config.model_store, _log.info)
    loaded = load(folder, config.dtype, config.max_context_tokens, torch.device("cpu"))
    # The other process has the weights and a pool, too.
    free_bytes = max(0, psutil.virtual_memory().available - loaded.facts.weight_bytes) // 2
    sides = open_sides(
        loaded,
        cores,
        _pool_blocks(config, loaded.facts.kv_layout, free_bytes),
        notify,
        max_context_tokens=config.max_context_tokens,
        log_level=config.log_level,
    )
    policies = apart_policies(cores.partition)
    return _Compute(
        folder,
        loaded,
        sides.model.layers,
        sides.pool.blocks,
        cores.table,
        policies,
        sides.estimates,
        None,
        sides.executor,
        shares=False,  # what decode holds, the other process would have to get first
    )


def _on_gpu(config: ServeConfig) -> _Compute:
    if config.kv_host_bytes or config.kv_disk_bytes:
        raise CannotServe(
            "on a GPU no KV is kept below the device so far: leave out --kv-host-memory and --kv-disk-memory"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    folder = resolve(config.model, config.model_store, _log.info)
    loaded = load(folder, config.dtype, config.max_context_tokens, device)
    facts = loaded.facts
    parts = open_gpu(
        loaded.module,
        facts.kv_layout,
        device=device,
        vocab_size=facts.vocab_size,
        most_tokens=facts.max_context_tokens,
        kv_pool_bytes=config.kv_pool_bytes,
    )
    table = parts.lanes.table
    key = gpu_key(facts, device, table.units)
    profile = find_profile(config, key)
    estimates = calibrate_gpu(parts, facts.max_context_tokens)  # warms up all lanes, too
    if profile is not None:
        estimates = profile.estimates()
    executor = partial(cuda_executor, parts)
    policies = live_policies(table)
    return _Compute(folder, loaded, parts.model.layers, parts.blocks, table, policies, estimates, key, executor)


def _pool_blocks(config: ComputeConfig, layout: KVLayout, free_bytes: int) -> int:
    size = config.kv_pool_bytes or min(KV_DEFAULT_MOST_BYTES, int(free_bytes * KV_SHARE_OF_FREE_MEMORY))
    if size > free_bytes:
        raise CannotServe(
            f"a KV pool of {size} bytes does not fit: {free_bytes} bytes of memory are free for it; ask for less"
        )
    if layout.blocks_in(size) < 1:
        raise CannotServe(
            f"a KV pool of {size} bytes is too small: this model's KV of {layout.block_tokens} tokens, the least that "
            f"can be held, takes {layout.block_bytes} bytes"
        )
    return layout.blocks_in(size)
