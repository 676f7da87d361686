"""The command line and environment that start one engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf import json_format

from tidelane.agent.claims import Claim
from tidelane.agent.devices import Device, DeviceKind
from tidelane.rpc.wire import ExecutionMode, Objective, ReplicaSpec, objective_to_wire

ENGINE_COMMAND = (sys.executable, "-m", "tidelane.cli.main", "serve")


def engine_arguments(
    spec: ReplicaSpec,
    objective: Objective,
    host: str,
    port: int,
    control_socket: Path,
    model_store: Path | None,
    cores: Sequence[int],
    kv_pool_bytes: int,
    kv_disk_folder: Path,
) -> list[str]:
    """The flags of `tidelane serve`. `kv_pool_bytes` 0 lets the engine choose; no `cores`: all it may use."""
    arguments = {
        "--model": spec.model.source,
        "--served-name": spec.model.served_name,
        "--host": host,
        "--port": str(port),
        "--dtype": spec.model.dtype,
        "--kv-pool-memory": str(kv_pool_bytes),
        "--objective": json_format.MessageToJson(objective_to_wire(objective), indent=None),
        "--control-socket": str(control_socket),
    }
    below = bool(spec.kv_cache.host_memory_bytes or spec.kv_cache.nvme_bytes)
    flags: list[str] = []
    if spec.objective.mode is not ExecutionMode.DISAGGREGATED:  # whose engine keeps no KV for later prompts
        if spec.kv_cache.host_memory_bytes:
            arguments["--kv-host-memory"] = str(spec.kv_cache.host_memory_bytes)
        if spec.kv_cache.nvme_bytes:
            arguments["--kv-disk-memory"] = str(spec.kv_cache.nvme_bytes)
            arguments["--kv-disk-folder"] = str(kv_disk_folder)
        if spec.kv_cache.dtype != "auto" and below:
            arguments["--kv-dtype"] = spec.kv_cache.dtype
        if spec.kv_cache.idle_timeout_s is not None:
            arguments["--kv-idle-timeout"] = str(spec.kv_cache.idle_timeout_s)
        if spec.kv_cache.prefetch and below:
            flags.append("--kv-prefetch")
    if spec.model.max_context_tokens is not None:
        arguments["--max-context-tokens"] = str(spec.model.max_context_tokens)
    if model_store is not None:
        arguments["--model-store"] = str(model_store)
    if cores:
        arguments["--cores"] = ",".join(map(str, cores))
    return [*(word for pair in arguments.items() for word in pair), *flags]


def claimed_cores(claim: Claim, devices: Mapping[str, Device]) -> tuple[int, ...]:
    return tuple(
        core
        for slot in claim.slots
        if slot.device_id in devices
        for core in devices[slot.device_id].slot_cores(slot.index)
    )


def kv_pool_bytes(claim: Claim, devices: Mapping[str, Device], pools: int) -> int:
    """Of each of `pools` pools. 0, the engine's own choice, where it has a device to itself; together half of what its
    slot leaves where it shares one."""
    shared = [devices[slot.device_id] for slot in claim.slots if slot.device_id in devices]
    if not any(device.slots > 1 for device in shared):
        return 0
    return sum(max(0, device.slot_memory_bytes - claim.bytes_per_slot) // (2 * pools) for device in shared)


def engine_environment(claim: Claim, devices: Mapping[str, Device]) -> dict[str, str]:
    """The agent's own environment, with only the claimed GPUs in sight."""
    gpus = [i for i in claim.device_ids if i not in devices or devices[i].kind is DeviceKind.GPU]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}
