"""`tidelane kv-bench`: whether it pays to keep KV below the device, in one run on one machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import torch

from tidelane.engine.bench.kv_beside import decode_beside_copies
from tidelane.engine.bench.kv_rates import fetch_rate, load_rate
from tidelane.engine.bench.kv_report import KvReport, Setting, Sizes
from tidelane.engine.bench.kv_turns import host_slots, prompt_blocks, turns
from tidelane.engine.config import ComputeConfig
from tidelane.engine.errors import CannotServe
from tidelane.engine.execution.starting import cpu_name
from tidelane.engine.kv.page_file import PAGE, PageFile
from tidelane.engine.kv.slot_file import FILE_NAME
from tidelane.engine.lanes.cores import leave_compute_to_lanes
from tidelane.engine.model.loading import ModelFacts, load
from tidelane.engine.model.store import resolve

# A load takes a twentieth of a second: more of them cost little, and their median is that much steadier.
_RATES_PER_ROUND = 3


def measure(config: ComputeConfig, sizes: Sizes, folder: Path, tell: Callable[[str], None]) -> KvReport:
    """KV on the disk lies in `folder`, in one of its own that is deleted again.

    Raises CannotServe for what can never be, OtherCase and MovesLost where something else would be measured, and
    OSError if the disk fails.
    """
    leave_compute_to_lanes()
    load_average, _, _ = os.getloadavg()
    loaded = load(
        resolve(config.model, config.model_store, tell), config.dtype, config.max_context_tokens, torch.device("cpu")
    )
    facts = loaded.facts
    cores = config.cores or tuple(sorted(os.sched_getaffinity(0)))
    _check_room(facts, sizes)
    with tempfile.TemporaryDirectory(prefix="tidelane-kv-bench-", dir=folder) as made:
        direct = _takes_direct(Path(made, "probe", FILE_NAME))
        found = turns(loaded, cores, sizes, Path(made, "turns"), tell)
        tell("Rates")
        rounds = _RATES_PER_ROUND * sizes.rounds
        loads = load_rate(facts.kv_layout, facts.dtype, found.slots, found.blocks, rounds)
        fetches = fetch_rate(facts.kv_layout, len(found.blocks), Path(made, "rates"), rounds)
        tell("Decode beside copies")
        beside = decode_beside_copies(loaded, cores, sizes)
        file_system = _file_system(Path(made))
    setting = Setting(
        model=config.model,
        dtype=str(facts.dtype).removeprefix("torch."),
        device=f"cpu: {cpu_name()}",
        cores=tuple(cores),
        memory_bytes=psutil.virtual_memory().total,
        file_system=file_system,
        direct=direct,
        token_bytes=facts.kv_layout.token_bytes,
        block_tokens=facts.kv_layout.block_tokens,
        load_average=load_average,
    )
    return KvReport(setting, sizes, (*found.ratios(), loads, fetches, beside))


def _check_room(facts: ModelFacts, sizes: Sizes) -> None:
    layout, tokens = facts.kv_layout, sizes.turn_tokens + 1
    if tokens > facts.max_context_tokens:
        raise CannotServe(
            f"a history of {sizes.history_tokens} tokens and a turn of {sizes.new_tokens + 1} do not fit the model's "
            f"context of {facts.max_context_tokens}: ask for a shorter history"
        )
    if sizes.history_tokens < layout.block_tokens:
        raise CannotServe(f"a history of {sizes.history_tokens} tokens fills no KV block of {layout.block_tokens}")
    # The rates take most: a pool, host memory, and two pieces of a history for memcpy.
    blocks = prompt_blocks(sizes, layout) + host_slots(sizes, layout) + 2 * layout.blocks_for(sizes.history_tokens)
    needed, free_bytes = blocks * layout.block_bytes, psutil.virtual_memory().available
    if needed > free_bytes:
        raise CannotServe(f"{needed} bytes of memory are needed, and {free_bytes} are free: ask for a shorter history")


def _takes_direct(path: Path) -> bool:
    with closing(PageFile.open(path, PAGE)) as probe:
        return probe.direct


def _file_system(folder: Path) -> str:
    """Its type, as the kernel calls it."""
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown"
