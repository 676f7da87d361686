"""`tidelane serve` as a process, with the built-in model, and what a client needs of it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import openai
from google.protobuf import json_format

from agent.engine_control_contract import objective
from tidelane.rpc import serving_pb2

MODEL = "builtin://smollm2-135m-instruct"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def serve_command(
    port: int,
    folder: Path,
    mode: serving_pb2.ExecutionMode = serving_pb2.LANES,
    late_requests: serving_pb2.LateRequests = serving_pb2.SERVE,
) -> list[str]:
    wanted = objective(revision=1)
    wanted.mode, wanted.late_requests = mode, late_requests
    wanted.slo.tpot_s = 2.0  # however slow the machine, streams run side by side
    return [
        *(sys.executable, "-m", "tidelane.cli.main", "serve", "--model", MODEL, "--served-name", "chat"),
        *("--port", str(port), "--control-socket", str(folder / "control")),
        *("--objective", json_format.MessageToJson(wanted), "--kv-pool-memory", str(512 << 20)),
    ]


class Served:
    """A serving engine, and what a client needs of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    async def until_ready(self) -> None:
        async with httpx.AsyncClient() as client, asyncio.timeout(180):
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return
                assert self.process.poll() is None, "the engine ended"
                await asyncio.sleep(0.2)  # the interval of a poll with a deadline

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
        async with asyncio.timeout(60):
            while any(await self.metrics(*held)):
                await asyncio.sleep(0.1)  # the interval of a poll with a deadline


async def text_of(client: openai.AsyncOpenAI, prompt: str, tokens: int) -> str:
    stream = await client.completions.create(
        model="chat", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
