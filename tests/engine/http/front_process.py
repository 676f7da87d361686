"""The front as it runs in production: a process of its own, on a port of its own, with a lifeline."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import httpx

from engine.http.fake_loop import PATIENCE_S, FakeLoop
from tidelane.engine.channel import Facts
from tidelane.engine.http.config import FrontConfig

SERVED_NAME = "tiny"


class FrontProcess:
    """A front and the fake loop behind it."""

    def __init__(self, folder: Path, facts: Facts, open_files: int | None = None) -> None:
        channel = str(folder / "loop.sock")
        read_end, self.lifeline = os.pipe()
        self.port = _free_port()
        self.loop = FakeLoop(channel, facts)
        self.loop.start()
        config = FrontConfig(channel, "127.0.0.1", self.port, read_end, facts.served_name)
        self._log = (folder / "front.log").open("wb")
        limited = [] if open_files is None else ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh"]
        self.process = subprocess.Popen([*limited, *config.argv()], pass_fds=[read_end], stderr=self._log)
        os.close(read_end)
        self.url = f"http://127.0.0.1:{self.port}"
        # One for all tests: making a client loads certificates, which takes longer than most of them.
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, "the front died while starting"
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError("the front never became ready")

    def kill_core(self) -> None:
        """What the front sees when the core dies: end of file on its lifeline, and a closed channel."""
        os.close(self.lifeline)
        self.lifeline = -1
        self.loop.stop()

    def stop(self) -> None:
        if self.lifeline >= 0:
            self.kill_core()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.http.close()
            if self.process.poll() is None:
                self.process.kill()
            self._log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
