from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.scripted import PATIENCE_S, ScriptedBackend
from tidelane.engine.http.listener import listen
from tidelane.router.address import Address
from tidelane.router.fleet import Rhythm
from tidelane.router.serve import RouterConfig, Serving

# No poll but those that a test asks for.
NEVER = Rhythm(poll_s=3600.0, poll_timeout_s=PATIENCE_S, resolve_s=3600.0)


@dataclass
class RunningRouter:
    """A router that listens, and a client of it."""

    serving: Serving
    url: str
    http: httpx.AsyncClient

    async def poll(self) -> None:
        fleet = self.serving.router.fleet
        await asyncio.gather(*(fleet.poll(each) for each in fleet.backends.values()))

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(
            s.value for s in samples if s.name == f"tidelane_router_{name}" and labels.items() <= s.labels.items()
        )


StartRouter = Callable[..., Awaitable[RunningRouter]]
StartBackend = Callable[..., Awaitable[ScriptedBackend]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as resources:
        yield resources


@pytest.fixture
def start_backend(stack: AsyncExitStack) -> StartBackend:
    async def start(model: str = "chat") -> ScriptedBackend:
        backend = ScriptedBackend(model)
        await backend.start()
        stack.push_async_callback(backend.stop)
        return backend

    return start


@pytest.fixture
def start_router(stack: AsyncExitStack) -> StartRouter:
    async def start(*urls: str, rhythm: Rhythm = NEVER, most_tries: int = 3, drain_s: float = 30.0) -> RunningRouter:
        config = RouterConfig(
            "127.0.0.1", 0, tuple(map(Address.of_url, urls)), most_tries=most_tries, drain_s=drain_s, rhythm=rhythm
        )
        serving = Serving(config, open_files=1024)
        listener = listen("127.0.0.1", 0, 60.0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = asyncio.create_task(serving.run(listener))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False))

        async def stop() -> None:
            serving.drain()
            serving.drain()  # at once
            async with asyncio.timeout(PATIENCE_S):
                await running

        stack.push_async_callback(stop)
        await http.get("/health")  # the listener takes it; it is answered once all backends have been asked
        return RunningRouter(serving, url, http)

    return start
