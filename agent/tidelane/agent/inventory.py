"""Which inventory this node has."""

from __future__ import annotations

from typing import Literal

import pynvml  # type: ignore[import-untyped]

from tidelane.agent.cpu import CpuInventory
from tidelane.agent.devices import DeviceInventory, FirstFound
from tidelane.agent.errors import CannotStart
from tidelane.agent.gpu import NvmlInventory


def find_inventory(kind: Literal["auto", "cpu", "gpu"] = "auto", cpu_slots: int = 1) -> DeviceInventory:
    """`auto`: GPUs where NVIDIA's driver shows any, else the CPU, for up to `cpu_slots` replicas.

    On a GPU node say `gpu`: there a driver that is missing for a while must not make a CPU node of it. Raises
    CannotStart.
    """
    if cpu_slots < 1:
        raise CannotStart("the number of CPU slots must be at least 1")
    cpu = CpuInventory(cpu_slots)
    if kind == "cpu":
        return cpu
    gpus = NvmlInventory.open(pynvml)
    if gpus is None and kind == "gpu":
        raise CannotStart("no NVIDIA driver found on this node")
    if gpus is None:
        return cpu
    return gpus if kind == "gpu" else FirstFound([gpus, cpu])
