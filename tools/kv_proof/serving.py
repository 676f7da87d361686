"""`tidelane serve` as a process with KV in all tiers, and what a client needs of it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from google.protobuf import json_format
from tools.live.rig import MODEL, NAME, tidelane

from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode, Objective, objective_to_wire

# Streams run side by side, however slow the machine.
_LOOSE = Slo(ttft_s=2.0, ttft_per_1k_input_tokens_s=2.0, tpot_s=2.0, percentile=90)
# Far beyond what they take beside nothing else; a proof may run beside much.
READY_WITHIN_S = 300.0
IDLE_WITHIN_S = 120.0
_POLL_S = 0.1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def until_ready(url: str, ended: Callable[[], int | None]) -> None:
    """Until what listens there takes requests. `ended` is the exit code of its process, None while it runs; raises
    RuntimeError once it has one."""
    async with httpx.AsyncClient() as client, asyncio.timeout(READY_WITHIN_S):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            if (code := ended()) is not None:
                raise RuntimeError(f"the process behind {url} ended with code {code}")
            await asyncio.sleep(_POLL_S)


class Served:
    """A serving engine, and what a client needs of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    async def until_ready(self) -> None:
        await until_ready(self.url, self.process.poll)

    async def metric(self, name: str) -> float:
        (value,) = await self.metrics(name)
        return value

    async def metrics(self, *names: str) -> list[float]:
        """All of the same moment."""
        async with httpx.AsyncClient() as client:
            lines = (await client.get(f"{self.url}/metrics")).text.splitlines()
        return [
            next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tidelane_{name}"))
            for name in names
        ]

    async def until_idle(self) -> None:
        """Until nothing runs or waits and no block is held: metrics lag behind answers by up to a heartbeat."""
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        async with asyncio.timeout(IDLE_WITHIN_S):
            while any(await self.metrics(*held)):
                await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Room:
    """For KV, by tier."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int


class TieredEngine:
    """An engine with KV on the device, in host memory and on a disk, whose log is read.

    `launcher` is a program to run in the stead of `tidelane`, with the same words; `wrapper` what runs that. It is
    killed at the end, if it has not ended by itself.
    """

    def __init__(
        self,
        folder: Path,
        room: Room,
        *,
        model: str = MODEL,
        kv: Path | None = None,
        launcher: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ) -> None:
        port = free_port()
        self.kv = kv or folder / "kv"
        self._log = folder / "log"
        objective = json_format.MessageToJson(objective_to_wire(Objective(_LOOSE, ExecutionMode.LANES)))
        tiers = {"pool": room.device_bytes, "host": room.host_bytes, "disk": room.disk_bytes}
        words = ["--model", model, "--served-name", NAME, "--port", str(port), "--objective", objective]
        words += ["--control-socket", str(folder / "control"), "--kv-disk-folder", str(self.kv)]
        words += [text for tier, size in tiers.items() for text in (f"--kv-{tier}-memory", str(size))]
        command = [sys.executable, *launcher, "serve", *words] if launcher else tidelane("serve", *words)
        with self._log.open("w") as log:
            self.process = subprocess.Popen([*wrapper, *command], stderr=log, stdout=log)
        self.served = Served(self.process, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL; its front ends by itself."""
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()

    async def moved(self, figure: str, way: str) -> float:
        """To the disk (`way` store) or from it (load)."""
        return await self.served.metric(f'kv_{figure}_total{{model_name="{NAME}",tier="disk",way="{way}"}}')

    async def until(self, figure: str, way: str, least: float) -> None:
        async with asyncio.timeout(60):
            while await self.moved(figure, way) < least:
                await asyncio.sleep(_POLL_S)

    async def end(self) -> None:
        """As SIGTERM asks. Raises RuntimeError if it does not end well."""
        self.process.terminate()
        code = await asyncio.to_thread(self.process.wait, 60)
        if code or "Traceback" in self.log():
            raise RuntimeError(f"the engine ended with code {code}: {self.log()[-2000:]}")
