"""Copies between tiers, on threads of their own."""

from __future__ import annotations

import logging
import os
import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from tidelane.engine.kv.moves import Load, Move, Store
from tidelane.engine.kv.traffic import Traffic

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Move)


@dataclass(frozen=True, slots=True)
class Way(Generic[M]):
    """How moves of one kind are made: `copy` returns the bytes it has copied, None if nothing came of it, and what it
    raises is told.

    Each kind has `threads` of its own, so that no one waits for a block behind those that nobody waits for.
    """

    kind: type[M]
    copy: Callable[[Sequence[M]], int | None]
    threads: int = 1


class Copier(Protocol):
    """Copies between two tiers, each move by itself, but all stores that were started at once together."""

    def ways(self) -> Sequence[Way[Any]]: ...

    def close(self) -> None:
        """No copy is under way any more."""
        ...


class CopyingMover:
    """Every move that is started ends, well or not, and the arrival of a load is there by then, or has failed.

    `notify` is called when some have ended. `traffic` is told of all copies. The copiers are this one's to close.
    """

    def __init__(self, copiers: Sequence[Copier], notify: Callable[[], None], traffic: Traffic) -> None:
        self._copiers = copiers
        self._notify = notify
        self._traffic = traffic
        self._ended: queue.SimpleQueue[tuple[Move, bool]] = queue.SimpleQueue()
        self._threads = [
            (way, ThreadPoolExecutor(way.threads, f"kv-{way.kind.__name__.lower()}", give_way_to_lanes))
            for copier in copiers
            for way in copier.ways()
        ]

    def start(self, moves: Sequence[Move]) -> None:
        for way, threads in self._threads:
            mine = [move for move in moves if isinstance(move, way.kind)]
            for part in [mine] if way.kind is Store and mine else [[move] for move in mine]:
                threads.submit(self._copy, way, part).add_done_callback(partial(self._end, way.kind, part))

    def poll(self) -> list[tuple[Move, bool]]:
        return [self._ended.get_nowait() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """What has not begun is dropped, and ends so."""
        for _, threads in self._threads:
            threads.shutdown(cancel_futures=True)
        for copier in self._copiers:
            copier.close()

    def _copy(self, way: Way[Any], moves: Sequence[Move]) -> int | None:
        with self._traffic.copying(way.kind):
            return way.copy(moves)

    def _end(self, kind: type[Move], moves: Sequence[Move], done: Future[int | None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            _log.error("a copy of KV failed", exc_info=error)
        copied = None if done.cancelled() or error is not None else done.result()
        self._traffic.ended(kind, len(moves), copied)
        for move in moves:
            if copied is None and isinstance(move, Load):
                move.arrival.fail()
            self._ended.put((move, copied is not None))
        self._notify()


def give_way_to_lanes() -> None:
    """This thread computes on one core, and only while nobody else wants it.

    So no decode step is late for a copy; a lane that waits for a load leaves its cores to it (docs/adr/0029). Linux
    only: elsewhere no thread has a scheduling class of its own.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
