"""Which inventory this node has."""

from __future__ import annotations

import pynvml  # type: ignore[import-untyped]

from tidelane.agent.cpu import CpuInventory
from tidelane.agent.devices import DeviceInventory, FirstFound
from tidelane.agent.gpu import NvmlInventory


def find_inventory(cpu_slots: int = 1) -> DeviceInventory:
    """GPUs where NVIDIA's driver shows any, else the CPU, for up to `cpu_slots` replicas."""
    cpu = CpuInventory(cpu_slots)
    gpus = NvmlInventory.open(pynvml)
    return FirstFound([gpus, cpu]) if gpus else cpu
