"""Who holds which part of which device. Pure: no slot ever has two holders, whatever the order of calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidelane.agent.devices import Device, DeviceKind
from tidelane.agent.errors import NoRoom
from tidelane.agent.footprint import Footprint

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One of a device's equal parts; a GPU has a single one."""

    device_id: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one replica holds, and what it is expected to need of each slot."""

    slots: tuple[Slot, ...]
    bytes_per_slot: int

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(slot.device_id for slot in self.slots)


def choose(
    wanted: int, need: Footprint, devices: Sequence[Device], held: Collection[Slot], keep: Sequence[Slot] = ()
) -> Claim:
    """`wanted` devices for one replica, those of `keep` first, so that nothing moves without a reason.

    `held` are the slots of other replicas. Raises NoRoom with the numbers.
    """
    usable = [device for device in devices if device.healthy]
    if not usable:
        raise NoRoom(f"no healthy device; the node has {len(devices)}")
    if wanted > len(usable):
        raise NoRoom(f"{wanted} devices wanted; the node has {len(usable)} healthy of {len(devices)}")
    kept = {slot.device_id: slot for slot in keep}
    slots: list[Slot] = []
    too_small: list[str] = []
    for device in sorted(usable, key=lambda device: device.id not in kept):
        needed = _needed_of(device, need, wanted)
        if needed > device.slot_memory_bytes:
            too_small.append(
                f"{device.id} offers {device.slot_memory_bytes // _MIB} MiB of {needed // _MIB} MiB needed"
            )
        elif slot := _free_slot(device, held, kept.get(device.id)):
            slots.append(slot)
        if len(slots) == wanted:
            return Claim(tuple(slots), needed)
    taken = f"{len(held)} of {sum(device.slots for device in usable)} slots are held"
    raise NoRoom(f"{wanted} devices wanted, {len(slots)} free: " + "; ".join([taken, *too_small]))


def _needed_of(device: Device, need: Footprint, wanted: int) -> int:
    if device.kind is DeviceKind.CPU:
        return need.device_bytes + need.host_bytes
    return -(-need.device_bytes // wanted)


def _free_slot(device: Device, held: Collection[Slot], preferred: Slot | None) -> Slot | None:
    candidates = [Slot(device.id, index) for index in range(device.slots)]
    if preferred in candidates:
        candidates.insert(0, preferred)
    return next((slot for slot in candidates if slot not in held), None)
