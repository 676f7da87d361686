"""Copies between the device and host memory, on threads of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.moves import Load, Move, Store

_log = logging.getLogger(__name__)


class HostMover:
    """One thread stores and one loads, so that no one waits for a block behind those that nobody waits for.

    The books see to it that no block is written while it is copied from or to. `notify` is called when one has ended.
    """

    def __init__(self, pool: DevicePool, host: HostMemory, notify: Callable[[], None]) -> None:
        self._pool = pool
        self._host = host
        self._notify = notify
        self._ended: queue.SimpleQueue[tuple[Move, bool]] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[list[Store] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("kv-store", self._store), ("kv-load", self._load))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, moves: Sequence[Move]) -> None:
        stores = [move for move in moves if isinstance(move, Store)]
        if stores:
            self._stores.put(stores)
        for move in moves:
            if isinstance(move, Load):
                self._loads.put(move)

    def poll(self) -> list[tuple[Move, bool]]:
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                return ended

    def close(self) -> None:
        """Ends what was started, and then the threads."""
        self._stores.put(None)
        self._loads.put(None)
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()
    def _store(self) -> None:
        torch.set_num_threads(1)
        while (stores := self._stores.get()) is not None:
            well = self._tried(partial(self._store_all, stores))
            for move in stores:
                self._ended.put((move, well))
            self._notify()

    @torch.inference_mode()
    def _load(self) -> None:
        torch.set_num_threads(1)
        while (load := self._loads.get()) is not None:
            well = self._tried(partial(self._load_layers, load))
            if not well:
                load.arrival.fail()
            self._ended.put((load, well))
            self._notify()

    def _store_all(self, stores: list[Store]) -> None:
        self._host.store(self._pool, [move.block for move in stores], [move.slot for move in stores])

    def _load_layers(self, load: Load) -> None:
        for layer in range(self._host.layout.layers):
            self._host.load(self._pool, load.blocks, load.slots, layer)
            load.arrival.reached(layer + 1)

    def _tried(self, copy: Callable[[], None]) -> bool:
        try:
            copy()
        except Exception:
            # The outermost frame of this thread: one that died of a copy would leave all later ones undone.
            _log.exception("a copy of KV failed")
            return False
        return True
