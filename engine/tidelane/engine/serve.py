"""One engine as processes: this one runs the loop, a child runs the HTTP front."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

from tidelane.engine.channel import Endpoint, ToFront, ToLoop, loop_end
from tidelane.engine.config import ServeConfig
from tidelane.engine.control import ControlRoom, start_control_server
from tidelane.engine.errors import CannotServe, EngineStuck, FrontLost, PrefillSideLost
from tidelane.engine.http.config import EX_CONFIG, FrontConfig
from tidelane.engine.kv.moves import Mover
from tidelane.engine.lanes.spinning import limit_spinning
from tidelane.engine.ledger import Ledger
from tidelane.engine.wakeup import Wakeup
from tidelane.rpc import serving_pb2

_log = logging.getLogger(__name__)

# SIGTERM without a Drain before it: how long running requests may take to end.
TERM_DRAIN_S = 10.0
# Far beyond any slice: the longest pass is 2,048 tokens through all layers, before anything was measured.
STUCK_S = 180.0
# What a Unix socket's address holds (sun_path), less the closing zero.
LONGEST_SOCKET_PATH = 107
# A front whose core is gone says it is gone within 2 s.
FRONT_EXIT_S = 4.0
# For copies of KV that have begun; a disk that hangs would hold up the end for ever.
COPIES_END_S = 5.0


def serve(config: ServeConfig) -> int:
    """Run until drained, or told to end. Returns the process's exit code: 0, 78 (never as asked) or 1."""
    copies = _Copies()
    code = _serve(config, copies)
    if copies.hang:
        logging.shutdown()
        os._exit(code)  # the interpreter would wait for the thread that waits for the disk
    return code


def _serve(config: ServeConfig, copies: _Copies) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="tidelane-") as folder:
            _Serving(config, Path(folder), copies).run()
    except CannotServe as error:
        _log.error("cannot serve: %s", error)
        return EX_CONFIG
    except (FrontLost, PrefillSideLost, EngineStuck, OSError) as error:
        _log.error("cannot go on: %s", error)
        return 1
    return 0


class _Copies:
    """`hang`: some had begun and did not end in time when the engine did."""

    def __init__(self) -> None:
        self.hang = False

    def end(self, mover: Mover) -> None:
        closing = threading.Thread(target=mover.close, daemon=True)
        closing.start()
        closing.join(COPIES_END_S)
        self.hang = closing.is_alive()
        if self.hang:
            _log.error("copies of KV have not ended within %.0f s: ending without them", COPIES_END_S)


class _Serving:
    def __init__(self, config: ServeConfig, folder: Path, copies: _Copies) -> None:
        self._config = config
        self._copies = copies
        self._folder = folder
        self._loaded = False
        self._wakeup = Wakeup()
        self._room = ControlRoom(config.objective, self._wakeup.notify)
        self._identity = serving_pb2.EngineStatus(
            model_name=config.served_name, listen=f"{config.host}:{config.port}", pid=os.getpid()
        )

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        # Found out now rather than after the model is loaded. (The front binds it itself, a moment later.)
        socket.create_server((self._config.host, self._config.port), family=_family(self._config.host)).close()
        socket_path = self._config.control_socket or self._folder / "control.sock"
        if len(str(socket_path)) > LONGEST_SOCKET_PATH or not socket_path.parent.is_dir():
            raise CannotServe(
                f"control socket {socket_path}: its folder must exist, and its path take at most "
                f"{LONGEST_SOCKET_PATH} bytes"
            )
        socket_path.unlink(missing_ok=True)
        control = start_control_server(self._room, str(socket_path))
        endpoint = loop_end(str(self._folder / "front.sock"))
        lifeline_read, lifeline_write = os.pipe()
        front = self._spawn_front(lifeline_read)
        try:
            self._serve_with(front, endpoint)
        finally:
            endpoint.close()  # flushes what the loop said last
            os.close(lifeline_write)
            _end(front)
            self._room.close()
            control.stop(grace=1.0).wait()

    def _spawn_front(self, lifeline_read: int) -> subprocess.Popen[bytes]:
        front = FrontConfig(
            channel_path=str(self._folder / "front.sock"),
            host=self._config.host,
            port=self._config.port,
            lifeline_fd=lifeline_read,
            served_name=self._config.served_name,
            log_level=self._config.log_level,
        )
        child = subprocess.Popen(front.argv(), pass_fds=(lifeline_read,))
        os.close(lifeline_read)
        return child

    def _serve_with(self, front: subprocess.Popen[bytes], endpoint: Endpoint[ToFront, ToLoop]) -> None:
        limit_spinning(os.environ)
        # torch takes seconds to import: the control socket and the port are there before it.
        from tidelane.engine.assembly import assemble

        self._publish("loading the model")
        engine = assemble(self._config, self._room, self._wakeup, endpoint, self._identity)
        self._loaded = True
        try:
            endpoint.send(engine.front_facts)
            self._ended(front, engine.ledger)  # a front that could not start must not be announced
            _log.info("serving %s on %s", self._config.served_name, self._identity.listen)
            engine.loop.run(until=lambda: self._ended(front, engine.ledger))
            # The deadline has passed: what still runs ends with an error, not with silence.
            engine.ledger.fail_all("the engine is shutting down", time.monotonic())
            engine.desk.send(engine.ledger.take_outbox())
        finally:
            engine.executor.close()
            self._copies.end(engine.mover)

    def _ended(self, front: subprocess.Popen[bytes], ledger: Ledger) -> bool:
        code = front.poll()
        if code == EX_CONFIG:
            raise CannotServe("the HTTP front cannot serve this model; its log says why")
        if code is not None:
            raise FrontLost(f"the HTTP front ended with code {code}")
        now_s = time.monotonic()
        if ledger.still_for_s(now_s) > STUCK_S:
            raise EngineStuck(f"a launch, or the process that prefills, has not come back for {STUCK_S:.0f} s")
        drain_by_s = self._room.drain_by_s
        return drain_by_s is not None and (ledger.empty or now_s >= drain_by_s)

    def _publish(self, message: str) -> None:
        status = serving_pb2.EngineStatus(state=serving_pb2.EngineStatus.LOADING, message=message)
        status.MergeFrom(self._identity)
        self._room.publish(status)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._loaded:
            raise SystemExit(0)
        self._room.drain(TERM_DRAIN_S)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _end(front: subprocess.Popen[bytes]) -> None:
    """The front ends by itself once its lifeline is closed; it is killed only if it does not."""
    try:
        front.wait(timeout=FRONT_EXIT_S)
    except subprocess.TimeoutExpired:
        front.kill()
        front.wait()
