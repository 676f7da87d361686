"""The front as a process: starts with a port and a channel, and ends with the core that spawned it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import uvicorn

from tidelane.engine.channel import Facts, front_end
from tidelane.engine.http.app import build_app
from tidelane.engine.http.config import EX_CONFIG, FrontConfig
from tidelane.engine.http.connection import ACCEPTS_PER_TURN, bounded, connections_within, raise_open_files
from tidelane.engine.http.link import LoopLink
from tidelane.engine.http.listener import Server, listen
from tidelane.engine.http.metrics import Metrics
from tidelane.engine.http.service import Model, Service, core_lost
from tidelane.engine.http.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# After the core's death: how long its last messages may take to arrive, and when the front is gone at the latest.
_LAST_WORDS_S = 0.1
_EXIT_BY_S = 1.8


def main(argv: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="tidelane.engine.http", description="HTTP front of one engine.")
    parser.add_argument("--channel", required=True, help="Unix socket of the core loop")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--lifeline-fd", required=True, type=int)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    code = run_front(FrontConfig(args.channel, args.host, args.port, args.lifeline_fd, args.served_name))
    # A thread may still tokenise a long prompt, and an ordinary exit would wait for it.
    logging.shutdown()
    os._exit(code)


def run_front(config: FrontConfig) -> int:
    """Serves until the core is gone. Returns the exit code."""
    # Its life is the core's: a Ctrl-C or SIGTERM to the process group must not cut streams that the core still drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        listener = listen(config.host, config.port, config.limits.stall_s)
    except OSError as error:
        _log.error("cannot listen on %s:%d: %s", config.host, config.port, error)
        return 1
    return asyncio.run(_Front(config, listener).run())


class _Front:
    """Wires the parts together, and takes them down when the core dies."""

    def __init__(self, config: FrontConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._exit_code = 0
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._link = LoopLink(front_end(self._config.channel_path), self._loop, self._on_facts)
        metrics = Metrics(self._config.served_name, lambda: self._link.heartbeat)
        self._service = Service(
            self._config.served_name, self._config.limits, self._link, metrics, self._workers,
            monotonic_s=time.monotonic, unix_s=time.time, random_bits=secrets.randbits,
        )  # fmt: skip
        limits = self._config.limits
        most = connections_within(limits, raise_open_files())
        self._server = Server(
            uvicorn.Config(
                build_app(self._service),
                http=bounded(most, limits.head_timeout_s),
                backlog=ACCEPTS_PER_TURN,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                # Longer than proxies and clients keep idle connections, so that it is never we who close first.
                timeout_keep_alive=120,
                timeout_graceful_shutdown=1,
            )
        )
        self._link.start()
        self._loop.add_reader(self._config.lifeline_fd, self._on_lifeline)
        await self._server.serve(sockets=[self._listener])
        self._link.stop()
        return self._exit_code

    def _on_lifeline(self) -> None:
        if os.read(self._config.lifeline_fd, 1):
            return
        self._loop.remove_reader(self._config.lifeline_fd)
        _log.info("the core is gone")
        self._close()
        self._loop.call_later(_LAST_WORDS_S, self._lose_open)

    def _lose_open(self) -> None:
        if self._service.open_calls:
            _log.warning("requests that end without their answer, since the core is gone: %d", self._service.open_calls)
        self._link.lose(core_lost())

    def _close(self) -> None:
        """No new connections from now on; exit when the open ones are answered, and soon in any case."""
        self._service.core_lost = True
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _EXIT_BY_S)
        for server in getattr(self._server, "servers", ()):  # not there before start-up
            server.close()
        self._listener.close()
        self._server.should_exit = True

    def _on_facts(self, facts: Facts) -> None:
        self._loading = self._loop.create_task(self._load_model(facts))
        self._loading.add_done_callback(self._on_loaded)

    async def _load_model(self, facts: Facts) -> Model:
        folder = Path(facts.model_folder)
        tokenizer = await self._loop.run_in_executor(
            self._workers, lambda: Tokenizer.load(folder, lambda: datetime.now().astimezone())
        )
        return Model(facts, tokenizer)

    def _on_loaded(self, task: asyncio.Task[Model]) -> None:
        if task.cancelled():
            return
        # Whatever it is: `tokenizers` raises bare Exceptions, and without a tokenizer there is nothing to serve.
        error = task.exception()
        if error is None:
            self._service.model = task.result()
            self._link.ready()
            return
        reason = f"cannot load the model's tokenizer: {error}"
        _log.error(reason)
        _log.debug("in detail:", exc_info=error)
        self._link.failed(reason)
        self._exit_code = EX_CONFIG
        self._close()
