"""A router as a process: starts with addresses, and ends when it is told to, after its streams."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from dataclasses import dataclass, field

import uvicorn

from tidelane.engine.http.config import Limits
from tidelane.engine.http.connection import ACCEPTS_PER_TURN, bounded, connections_within, raise_open_files
from tidelane.engine.http.errors import Unavailable
from tidelane.engine.http.listener import Server, listen
from tidelane.router.address import Address
from tidelane.router.app import build_app
from tidelane.router.fleet import Fleet, Rhythm
from tidelane.router.metrics import Metrics
from tidelane.router.relay import Relay
from tidelane.router.routes import Router

_log = logging.getLogger(__name__)

# For the last events of streams that were cut at the deadline.
_LAST_WORDS_S = 2


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`backends` stay; each of `names` is looked up again and again."""

    host: str
    port: int
    backends: tuple[Address, ...]
    names: tuple[Address, ...] = ()
    most_tries: int = 3
    drain_s: float = 30.0
    rhythm: Rhythm = field(default_factory=Rhythm)
    limits: Limits = field(default_factory=Limits)


def serve(config: RouterConfig) -> int:
    """Until SIGTERM or SIGINT, and then until streams have ended. Returns the exit code."""
    try:
        listener = listen(config.host, config.port, config.limits.stall_s)
    except OSError as error:
        _log.error("cannot listen on %s:%d: %s", config.host, config.port, error)
        return 1
    # A client and its backend, for each that may be connected.
    asyncio.run(_until_told(Serving(config, raise_open_files() // 2), listener))
    return 0


async def _until_told(serving: Serving, listener: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.drain)
    await serving.run(listener)


class Serving:
    """Wires the parts together, and takes them down. `open_files`: that its clients may have between them."""

    def __init__(self, config: RouterConfig, open_files: int) -> None:
        self._config = config
        metrics = Metrics(lambda: self._fleet.backends, time.monotonic)
        self._fleet = Fleet(config.backends, config.names, config.rhythm, time.monotonic, gone=metrics.forget)
        relay = Relay(self._fleet, metrics, time.monotonic, config.most_tries)
        self.router = Router(self._fleet, relay, metrics, config.limits, time.monotonic)
        most = connections_within(config.limits, open_files)
        self._server = Server(
            uvicorn.Config(
                build_app(self.router, secrets.randbits),
                http=bounded(most, config.limits.head_timeout_s),
                backlog=ACCEPTS_PER_TURN,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_keep_alive=120,
                timeout_graceful_shutdown=int(config.drain_s) + _LAST_WORDS_S,
            )
        )

    async def run(self, listener: socket.socket) -> None:
        await self._fleet.start()
        _log.info("routing on %s:%d", *listener.getsockname()[:2])
        await self._server.serve(sockets=[listener])
        await self._fleet.stop()

    def drain(self) -> None:
        """No new connections; open streams go on, for so long as they may. Once more: at once."""
        if self.router.draining:
            self._lose_open()
            return
        self.router.draining = True
        _log.info("draining: open=%d", len(self.router.open))
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._config.drain_s, self._lose_open)

    def _lose_open(self) -> None:
        if self.router.open:
            _log.warning("requests that end without their answer: open=%d", len(self.router.open))
        self.router.lose_open(Unavailable("This router stops.", code="draining", retry_after_s=1))
