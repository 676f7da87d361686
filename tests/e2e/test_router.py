"""`tidelane router` as a process before two real engines, of which one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import openai
import pytest
from tools.kv_proof.serving import free_port, until_ready

from .serving import serve_command, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "Here is a list of the capitals of Europe, one after the other, and what each is known for: " * 4


class Process:
    """In a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    async def until_ready(self) -> None:
        await until_ready(self.url, lambda: self.process.returncode)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[tuple[Process, Process, Process]]:
    """Two engines and the router."""
    async with AsyncExitStack() as stack:

        async def start(command: list[str], port: int) -> Process:
            process = Process(await asyncio.create_subprocess_exec(*command, start_new_session=True), port)
            stack.push_async_callback(process.process.wait)
            stack.callback(process.kill)
            return process

        engines = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            port = free_port()
            engines.append(await start(serve_command(port, tmp_path / name), port))
        for engine in engines:
            await engine.until_ready()
        port = free_port()
        words = [word for engine in engines for word in ("--backend", engine.url)]
        router = await start([sys.executable, "-m", "tidelane.cli.main", "router", "--port", str(port), *words], port)
        await router.until_ready()
        yield engines[0], engines[1], router


async def metrics(url: str) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{url}/metrics")).text


def value(exposition: str, begins: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in exposition.splitlines() if line.startswith(begins))


async def test_a_replica_that_is_killed_costs_only_the_streams_that_it_had_begun(
    processes: tuple[Process, Process, Process],
) -> None:
    one, two, router = processes
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        expected = await text_of(client, PROMPT, 24)
        holder = one if value(await metrics(one.url), "tidelane_prompt_tokens_total") else two
        assert await text_of(client, PROMPT, 24) == expected
        # Its beginning led there again, and was there.
        assert value(await metrics(holder.url), "tidelane_prefix_cache_hits_total") > 0

        begun = await client.completions.create(
            model="chat", prompt=PROMPT, max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(begun)
        # Prompts that nobody has seen, so that some are being computed where the kill comes.
        waiting = [asyncio.create_task(text_of(client, f"{number} {PROMPT * 3}", 8)) for number in range(6)]
        async with asyncio.timeout(60):
            while value(await metrics(router.url), "tidelane_router_in_flight") < 7:
                await asyncio.sleep(0.01)
        holder.kill()
        with pytest.raises(openai.APIError, match="broke off in the middle"):
            async for _ in begun:
                pass
        assert all(await asyncio.gather(*waiting))
        after = await metrics(router.url)
        assert value(after, "tidelane_router_retries_total") >= 1
        assert value(after, "tidelane_router_backend_up") == 1

        # And the router ends as it should, with a stream open.
        last = await client.completions.create(
            model="chat", prompt="One, two,", max_tokens=32, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(last)
        router.process.terminate()
        assert sum([1 async for _ in last]) > 0
    assert await asyncio.wait_for(router.process.wait(), 60) == 0
