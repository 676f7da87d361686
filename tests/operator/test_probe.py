"""What probes of the operator are told over its life."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from tidelane.operator.probe import Probe


@pytest.fixture
def url() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}/healthz"


async def answers(url: str) -> list[tuple[int, str]]:
    """To a liveness probe and to a readiness probe."""
    found = []
    async with aiohttp.ClientSession() as session:
        for each in (url, url.replace("healthz", "readyz")):
            async with session.get(each) as answer:
                found.append((answer.status, (await answer.json())["control"]))
    return found


async def test_one_server_answers_in_every_phase(url: str) -> None:
    probe, faults = Probe(), ["the work queue ended", "nobody watches"]
    async with probe.served(url):
        assert await answers(url) == [(200, "starting"), (503, "starting")]
        probe.enter("standing by", ready=True)
        assert await answers(url) == [(200, "standing by"), (200, "standing by")]
        probe.enter("starting", ready=False)
        assert await answers(url) == [(200, "starting"), (503, "starting")]
        probe.enter("alive", ready=True, faults=lambda: faults)
        assert await answers(url) == [(503, "the work queue ended; nobody watches")] * 2
        faults.clear()
        assert await answers(url) == [(200, "alive"), (200, "alive")]


@pytest.mark.parametrize("wrong", ["https://127.0.0.1:1/healthz", "8080", "http://127.0.0.1:1/readyz"])
async def test_a_wrong_address_is_told_with_a_right_one(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"--liveness: .* must be like http://"):
        async with Probe().served(wrong):
            """Not reached."""


async def test_a_taken_address_is_told(url: str) -> None:
    async with Probe().served(url):
        with pytest.raises(ValueError, match=r"--liveness: cannot listen on 127\.0\.0\.1:"):
            async with Probe().served(url):
                """Not reached."""
