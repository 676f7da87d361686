"""The tiers of KV below a CPU's pool, opened as an engine's configuration asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from tidelane.engine.config import ServeConfig
from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.codecs import RAW, Codec, codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.disk_copier import DiskCopier, recovered
from tidelane.engine.kv.host_copier import HostCopier
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import Key, namespace
from tidelane.engine.kv.mover import Copier, CopyingMover
from tidelane.engine.kv.moves import Fetch, Mover, NoMover
from tidelane.engine.kv.slot_file import SlotFile
from tidelane.engine.kv.traffic import PartRead, RecentTimes, Traffic
from tidelane.engine.model.loading import ModelFacts, kv_namespace, whole_weights_digest

_log = logging.getLogger(__name__)

# Of host memory, through which KV goes to a disk and back, where none was given for it to stay.
DISK_STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Below:
    """The tiers below the device: room for so many blocks, of `record_bytes` each, what moves KV to them and back, what
    that comes to, and what an earlier engine has left on the disk, by slot: the name of a block and of that before it.
    `host` is the memory that contexts larger than the device may stream from.
    """

    mover: Mover = field(default_factory=NoMover)
    traffic: Traffic = field(default_factory=Traffic)
    host_slots: int = 0
    disk_slots: int = 0
    left: Mapping[int, tuple[Key, Key]] = field(default_factory=dict)
    record_bytes: int = 0
    host: HostMemory | None = None

    def fetch_times(self) -> RecentTimes:
        """Of moves from the disk."""
        return RecentTimes(lambda: self.traffic.of(Fetch), self.record_bytes)

    def read_times(self) -> RecentTimes:
        """Of contexts that stream, from host memory."""
        return RecentTimes(lambda: self.traffic.of(PartRead), self.record_bytes)


def open_below(config: ServeConfig, facts: ModelFacts, pool: DevicePool, notify: Callable[[], None]) -> Below:
    """Raises CannotServe if they can never be as asked; a disk that fails now is done without."""
    if not config.kv_host_bytes and not config.kv_disk_bytes:
        return Below()
    held_as = RAW if config.kv_dtype == "auto" else codec(config.kv_dtype)
    host, traffic = _host_memory(config.kv_host_bytes or DISK_STAGING_BYTES, facts, held_as), Traffic()
    copiers: list[Copier] = [HostCopier(pool, host)]
    disk_slots, left = 0, dict[int, tuple[Key, Key]]()
    if config.kv_disk_bytes and (opened := _slots_on_disk(config, facts, held_as)) is not None:
        slots, left = opened
        disk_slots = slots.layout.slots
        copiers.append(DiskCopier(host, slots))
    mover = CopyingMover(copiers, notify, traffic)
    to_stream_from = host if config.kv_host_bytes else None
    return Below(mover, traffic, host.slots, disk_slots, left, host.record_bytes, to_stream_from)


def _slots_on_disk(
    config: ServeConfig, facts: ModelFacts, held_as: Codec
) -> tuple[SlotFile, dict[int, tuple[Key, Key]]] | None:
    """And what is in them; None if the disk fails."""
    assert config.kv_disk_folder is not None
    try:
        slots, found = SlotFile.open(
            config.kv_disk_folder,
            namespace=namespace(kv_namespace(facts).hex(), whole_weights_digest(facts.folder), held_as.name),
            payload_bytes=held_as.block_bytes(facts.kv_layout),
            capacity_bytes=config.kv_disk_bytes,
        )
    except OSError as error:
        _log.error("serving without KV on disk: %s", error)
        return None
    _log.info("KV on disk: %d blocks are there of %d that have room", len(found), slots.layout.slots)
    return slots, recovered(found)


def _host_memory(size: int, facts: ModelFacts, held_as: Codec) -> HostMemory:
    free_bytes = psutil.virtual_memory().available
    if size > free_bytes:
        raise CannotServe(f"{size} bytes of host memory for KV do not fit: {free_bytes} are free; ask for less")
    block_bytes = held_as.block_bytes(facts.kv_layout)
    if size < block_bytes:
        raise CannotServe(
            f"{size} bytes of host memory for KV are too few: a block of this model takes {block_bytes} bytes"
        )
    return HostMemory.allocate(facts.kv_layout, size // block_bytes, held_as)
