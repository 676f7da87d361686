"""KV on its way between tiers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidelane.engine.kv.keys import Key

# Far beyond the time that any copy within a machine takes.
LOST_AFTER_S = 60.0


class LoadLost(RuntimeError):
    """What a launch waits for does not come: the launch fails, and who waited is computed again."""


class Arrival:
    """Blocks that are on their way up, layer by layer. Whoever computes with them waits for a layer, not for all."""

    def __init__(self) -> None:
        self._layers = 0
        self._lost = False
        self._changed = threading.Condition()

    @property
    def lost(self) -> bool:
        """Not all of it came, or will."""
        return self._lost

    def reached(self, layers: int) -> None:
        """The first `layers` are there."""
        with self._changed:
            self._layers = layers
            self._changed.notify_all()

    def fail(self) -> None:
        """No more will come."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Until this layer, counted from 0, is there. Raises LoadLost."""
        if self._layers > layer:  # a look without the lock: the number only grows
            return
        with self._changed:
            self._changed.wait_for(lambda: self._layers > layer or self._lost, LOST_AFTER_S)
            self._lost = self._lost or self._layers <= layer  # what has not come by now is not waited for again
        if self._layers <= layer:
            raise LoadLost(f"layer {layer} of KV from a lower tier did not come")


class Store(msgspec.Struct, frozen=True):
    """The block of this name is copied from device block `block` to host slot `slot`. No two moves have one number."""

    number: int
    key: Key
    block: int
    slot: int


class Load(msgspec.Struct, frozen=True):
    """Host slots to device blocks, pair by pair."""

    number: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    arrival: Arrival


class Spill(msgspec.Struct, frozen=True):
    """Host slot to disk slot. `parent` is the name before this one; empty: it is the first of its chain."""

    number: int
    key: Key
    parent: Key
    host_slot: int
    disk_slot: int


class Fetch(msgspec.Struct, frozen=True):
    """Disk slot to host slot."""

    number: int
    key: Key
    parent: Key
    disk_slot: int
    host_slot: int


Move = Store | Load | Spill | Fetch


class Mover(Protocol):
    """Copies between tiers while others compute."""

    def start(self, moves: Sequence[Move]) -> None:
        """Never blocks. Stores are begun in this order, and so are loads."""
        ...

    def poll(self) -> Sequence[tuple[Move, bool]]:
        """What has ended since the last call, and whether well. Never blocks."""
        ...

    def close(self) -> None: ...


class NoMover:
    """There is no tier but the device."""

    def start(self, moves: Sequence[Move]) -> None:
        assert not moves

    def poll(self) -> Sequence[tuple[Move, bool]]:
        return ()

    def close(self) -> None:
        """Nothing is under way."""
