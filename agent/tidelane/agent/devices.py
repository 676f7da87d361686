"""What a node can run engines on, whoever reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `slots` is how many replicas it can hold, each with an equal part of it.

    `cores` are the CPU's cores in the kernel's numbering; a GPU has none.
    """

    id: str
    kind: DeviceKind
    name: str
    memory_bytes: int
    compute_units: int
    healthy: bool = True
    slots: int = 1
    cores: tuple[int, ...] = ()

    @property
    def slot_memory_bytes(self) -> int:
        return self.memory_bytes // self.slots

    def slot_cores(self, slot: int) -> tuple[int, ...]:
        """The cores of one slot: disjoint between slots while there are enough, else shared one by one."""
        count = len(self.cores)
        slot %= self.slots  # A claim may be older than the present number of slots.
        if not count:
            return ()
        if self.slots > count:
            return (self.cores[slot % count],)
        return self.cores[slot * count // self.slots : (slot + 1) * count // self.slots]


class DeviceInventory(Protocol):
    """Reports the node's devices. May block for a while: call it outside the event loop.

    Ids are unique and stay the same from call to call and across restarts. A device that cannot be used is reported
    with `healthy` False rather than left out, as long as it can be named.
    """

    def devices(self) -> Sequence[Device]: ...


class FixedInventory:
    """Devices as given: for simulated nodes, and where an administrator describes them."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)

    def devices(self) -> Sequence[Device]:
        return self._devices


class FirstFound:
    """The devices of the first inventory that has any: GPUs if there are some, else the CPU."""

    def __init__(self, inventories: Sequence[DeviceInventory]) -> None:
        self._inventories = tuple(inventories)

    def devices(self) -> Sequence[Device]:
        for inventory in self._inventories:
            if found := inventory.devices():
                return found
        return ()
