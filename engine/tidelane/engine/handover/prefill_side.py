"""The decode side's end: keeps a prefill process alive, gives it slices, and says what became of them."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import msgspec

from tidelane.engine.errors import CannotServe, PrefillSideLost
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.execution.executor import Completion
from tidelane.engine.handover.config import PrefillConfig
from tidelane.engine.handover.messages import Compute, Computed, FromPrefill, Ready, ToPrefill, Unable
from tidelane.engine.kv.shared import SharedMemory
from tidelane.engine.wakeup import Wakeup

_log = logging.getLogger(__name__)

# Far beyond any slice, and less than what the engine itself takes for being stuck. A process that has not answered by
# then is killed: its lease has run out.
LEASE_S = 150.0
# One that has lived so long did not fail at starting.
STEADY_S = 60.0
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Up:
    """The process of this epoch takes slices. Epochs count the processes; what was meant for one is never given to
    another."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Down:
    """The process of this epoch is dead and reaped: it writes to no block any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Did:
    epoch: int
    completion: Completion


News = Up | Down | Did


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    link: Connection


class PrefillSide:
    """`notify` is called after each piece of news. The process starts at once; `ready` waits for the first one.
    `memory` is the pool that every process writes to, and is closed with this.

    A thread of its own starts the processes, as each dies with the thread that started it, and talks to them.
    """

    def __init__(
        self,
        config: PrefillConfig,
        memory: SharedMemory,
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._memory = memory
        self._notify = notify
        self._clock = clock
        self._first: Future[PassTimes] = Future()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[tuple[int, ToPrefill]] = queue.SimpleQueue()
        self._ordered = Wakeup()
        self._closing = threading.Event()
        self._starting = threading.Lock()  # so that `close` finds any process there is
        self._child: _Child | None = None
        self._lease_ends_s: float | None = None  # while a slice is there
        self._decoder: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)
        self._thread = threading.Thread(target=self._run, name="prefill-side", daemon=True)
        self._thread.start()

    def ready(self) -> PassTimes:
        """What passes take there, once the first process is warm.

        Raises CannotServe if none can ever be, PrefillSideLost if it ended.
        """
        return self._first.result()

    @property
    def pid(self) -> int | None:
        """The process there is now, ready or not."""
        child = self._child
        return child.process.pid if child is not None else None

    def order(self, epoch: int, message: ToPrefill) -> None:
        """Never blocks. Lost if the process of `epoch` has ended, of which there is, or will be, news."""
        if isinstance(message, Compute):
            self._lease_ends_s = self._clock() + LEASE_S
        self._orders.put((epoch, message))
        self._ordered.notify()

    def news(self) -> list[News]:
        """What has happened since the last call. Never blocks. Kills the process if its lease has run out."""
        news: list[News] = []
        while True:
            try:
                news.append(self._news.get_nowait())
            except queue.Empty:
                break
        if any(isinstance(each, Did | Down) for each in news):
            self._lease_ends_s = None
        if self._lease_ends_s is not None and self._clock() >= self._lease_ends_s:
            _log.error("the prefill side has not answered for %.0f s: killing it", LEASE_S)
            self._lease_ends_s = None
            self._kill()
        return news

    def close(self) -> None:
        with self._starting:
            self._closing.set()
        self._kill()
        self._ordered.notify()
        self._thread.join()
        self._ordered.close()
        self._memory.close()

    def _kill(self) -> None:
        """Whatever the thread waits for then, it learns of it."""
        with self._starting:
            if self._child is not None:
                self._child.process.kill()

    # ---- on the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        for epoch in itertools.count(1):
            ready_s = None
            try:
                child = self._start()
            except OSError as error:
                how = f"could not be started: {error}"
            else:
                if child is None:
                    return
                ready_s = self._attend(child, epoch)
                how = f"ended with code {self._end(child)}"
            if not self._first.done():
                self._first.set_exception(PrefillSideLost(f"the prefill side {how} before it was ready"))
            if self._first.exception() is not None:
                return
            if ready_s is not None:
                self._tell(Down(epoch))
                failures = 0 if self._clock() - ready_s > STEADY_S else failures
            delay_s = restart_delay_s(failures)
            failures += 1
            if not self._closing.is_set():
                _log.warning("the prefill side %s; starting it again in %.0f s", how, delay_s)
            if self._closing.wait(delay_s):
                return

    def _start(self) -> _Child | None:
        """None once closing. Raises OSError when it cannot be started."""
        ours, theirs = socket.socketpair()
        with theirs, self._starting:
            if self._closing.is_set():
                ours.close()
                return None
            process = subprocess.Popen(
                self._config.argv(theirs.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._config.memory_fd),
            )
            self._child = _Child(process, Connection(ours.detach()))
        return self._child

    def _attend(self, child: _Child, epoch: int) -> float | None:
        """Until it ends, or we close. When it was ready; None if it never was."""
        ready_s = None
        try:
            ready = self._decoder.decode(child.link.recv_bytes())
            if isinstance(ready, Unable):
                _log.error("the prefill side cannot serve: %s", ready.reason)
                if not self._first.done():
                    self._first.set_exception(CannotServe(f"the prefill side: {ready.reason}"))
                return None
            assert isinstance(ready, Ready)
            ready_s = self._clock()
            self._tell(Up(epoch))
            if not self._first.done():
                self._first.set_result(ready.times)
            self._talk(child.link, epoch)
        except (EOFError, OSError):
            pass  # it has ended, which `_end` makes sure of
        return ready_s

    def _talk(self, link: Connection, epoch: int) -> None:
        while not self._closing.is_set():
            readable = wait([link, self._ordered.fileno()])
            if link in readable:
                said = self._decoder.decode(link.recv_bytes())
                assert isinstance(said, Computed)
                self._tell(Did(epoch, said.completion))
            for message in self._taken_orders(epoch):
                link.send_bytes(msgspec.msgpack.encode(message))

    def _taken_orders(self, epoch: int) -> list[ToPrefill]:
        self._ordered.clear()
        taken: list[ToPrefill] = []
        while True:
            try:
                meant_for, message = self._orders.get_nowait()
            except queue.Empty:
                return taken
            if meant_for == epoch:
                taken.append(message)

    def _end(self, child: _Child) -> int:
        child.process.kill()
        code = child.process.wait()
        child.link.close()
        with self._starting:
            self._child = None
        return code

    def _tell(self, news: News) -> None:
        self._news.put(news)
        self._notify()


def restart_delay_s(failures: int) -> float:
    """After `failures` in a row before this one: at once, then 1 s, twice as long each time."""
    return 0.0 if failures == 0 else min(LONGEST_DELAY_S, 2.0 ** (min(failures, 16) - 1))
