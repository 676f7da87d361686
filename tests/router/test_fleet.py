"""Finding backends and hearing of them: names looked up again and again, polls, and what the process refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable

import pytest

from router.conftest import NEVER, StartBackend
from router.scripted import PATIENCE_S
from tidelane.cli.main import main
from tidelane.engine.request import ServiceTier
from tidelane.router.address import Address
from tidelane.router.ask import Ask
from tidelane.router.backend import STALE_S
from tidelane.router.fleet import Fleet, Rhythm, poll_interval_s
from tidelane.router.metrics import Metrics

NAME = Address("engines.test", 8000)
ONE, TWO = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000)
ASK = Ask("chat", ServiceTier.DEFAULT, 10)


class Names:
    def __init__(self, *found: Address) -> None:
        self.found: Iterable[Address] | None = found

    async def __call__(self, name: Address) -> Iterable[Address]:
        assert name == NAME
        if self.found is None:
            raise OSError("no such name")
        return self.found


async def test_backends_follow_their_name_and_stay_while_it_cannot_be_looked_up() -> None:
    names = Names(ONE)
    gone: list[str] = []
    fleet = Fleet([], [NAME], NEVER, lambda: 0.0, names, gone.append)
    await fleet.look_up(NAME)
    kept = fleet.backends[ONE.name]
    names.found = [TWO, ONE]
    await fleet.look_up(NAME)
    assert list(fleet.backends.values()) == [kept, fleet.backends[TWO.name]]
    names.found = None
    await fleet.look_up(NAME)
    assert len(fleet.backends) == 2
    names.found = [TWO]
    await fleet.look_up(NAME)
    assert list(fleet.backends) == [TWO.name]
    assert gone == [ONE.name]


def test_what_is_counted_of_a_backend_goes_with_it() -> None:
    metrics = Metrics(dict, lambda: 0.0)
    metrics.ended("one", "answered")
    metrics.ended("one", "busy")
    metrics.ended("two", "busy")
    metrics.forget("one")
    told = metrics.exposition().decode()
    assert 'backend="one"' not in told
    assert 'tidelane_router_requests_total{backend="two",outcome="busy"} 1.0' in told


async def test_a_backend_that_is_named_twice_is_there_once() -> None:
    fleet = Fleet([ONE], [NAME], NEVER, lambda: 0.0, Names(ONE, TWO))
    await fleet.look_up(NAME)
    assert list(fleet.backends) == [ONE.name, TWO.name]


async def test_loopback_is_found_by_its_name() -> None:
    fleet = Fleet([], [Address("localhost", 8000)], NEVER, lambda: 0.0)
    await fleet.look_up(Address("localhost", 8000))
    assert "127.0.0.1:8000" in fleet.backends


async def test_polls_go_on_and_one_that_hangs_holds_up_no_other(start_backend: StartBackend) -> None:
    well = await start_backend()
    released = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    address = Address("127.0.0.1", hanging.sockets[0].getsockname()[1])
    fleet = Fleet(
        [Address.of_url(well.url), address], [], Rhythm(poll_s=0.001, poll_timeout_s=0.05), lambda: 1.0
    )  # fmt: skip
    await fleet.start()
    assert fleet.healthy() == 1
    well.say(ready=False)
    async with asyncio.timeout(PATIENCE_S):
        while fleet.healthy():
            await asyncio.sleep(0.001)
        well.say(ready=True)
        while not fleet.healthy():
            await asyncio.sleep(0.001)
    assert [each.name for each in fleet.rank(ASK)] == [well.name, address.name]
    await fleet.stop()
    released.set()
    hanging.close()


@pytest.mark.parametrize(
    ("backends", "wanted_s", "interval_s"), [(2, 0.25, 0.25), (50, 0.25, 1.0), (1000, 0.25, 1.5), (2, 1.5, 1.5)]
)
def test_many_backends_are_asked_less_often_but_before_they_are_in_doubt(
    backends: int, wanted_s: float, interval_s: float
) -> None:
    assert poll_interval_s(wanted_s, backends) == pytest.approx(interval_s)
    assert interval_s < STALE_S


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "name replicas with --backend URL or --backends-dns HOST:PORT"),
        (["--backend", "https://x"], "--backend: 'https://x': expected http://HOST:PORT (engines speak plain HTTP)"),
        (["--backend", "a", "--poll", "2"], "--poll: 2 must be at most 1.5: what is heard grows stale"),
        (["--backends-dns", "x"], "--backends-dns: 'x': expected HOST:PORT, such as chat-engines.default.svc:8000"),
    ],
)
def test_what_it_cannot_route_to_it_refuses(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", *words]) == 64
    assert capsys.readouterr().err == f"tidelane router: {complaint}\n"


def test_it_loads_neither_torch_nor_tokenizers() -> None:
    code = (
        "import sys, tidelane.cli.router;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'zmq', 'pydantic', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
