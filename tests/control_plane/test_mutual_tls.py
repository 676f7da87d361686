"""An agent's server and the operator's channels, with real certificates that are renewed, expire or are foreign."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509

from agent.rig import cpu
from tidelane.agent.devices import FixedInventory
from tidelane.agent.errors import CannotStart
from tidelane.agent.node import NodeSettings
from tidelane.agent.server import Agent, AgentSettings
from tidelane.agent.server import TlsPaths as AgentPaths
from tidelane.operator.agents import AgentPool, OpenChannel, TlsPaths, tls_channels
from tidelane.rpc import node_agent_pb2 as pb
from tidelane.rpc.node_agent_pb2_grpc import NodeAgentStub

from .certificates import Authority, Side

_RENEWALS = 5
# Long enough for a slow machine to see each renewal, and far shorter than anybody's certificates.
_LIFETIME_S = 60


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents, self.operators, self.strangers = (Authority(name) for name in ("agents", "operators", "strangers"))
        self.agent_side = Side(folder / "agent", self.agents, self.operators, _LIFETIME_S)
        self.operator_side = Side(folder / "operator", self.operators, self.agents, _LIFETIME_S)
        self.agent = self.another()
        self.open = self.channels(self.operator_side)

    def another(self, name: str = "state") -> Agent:
        tls = AgentPaths(*self.agent_side.paths)
        settings = AgentSettings(NodeSettings("node-1"), self.folder / name, "127.0.0.1:0", tls)
        return Agent(settings, FixedInventory([cpu()]))

    @staticmethod
    def channels(side: Side) -> OpenChannel:
        return tls_channels(TlsPaths(side.authority, side.certificate, side.key))

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.agent.port}"

    async def call(self, open_channel: OpenChannel | None = None) -> str:
        """The name of the node, over a connection of its own."""
        async with (open_channel or self.open)(self.target) as channel:
            status = await NodeAgentStub(channel).WatchNode(pb.WatchNodeRequest(), timeout=30).read()
            assert isinstance(status, pb.NodeStatus)
            return status.node_name

    async def why_not(self, open_channel: OpenChannel) -> str:
        """How a pool that follows the agent shows that it cannot."""
        told = asyncio.Event()
        pool = AgentPool(open_channel, lambda: 0.0, lambda *_: told.set())
        pool.follow([self.target])
        try:
            async with asyncio.timeout(30):
                await told.wait()
            assert pool.nodes() == {}
            return pool.unreached[self.target]
        finally:
            await pool.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    async with made.agent:
        yield made


async def test_both_sides_are_renewed_five_times_under_load_and_no_call_fails(rig: Rig) -> None:
    ended, calls = asyncio.Event(), 0

    async def load() -> None:
        nonlocal calls
        while not ended.is_set():
            assert await rig.call() == "node-1"
            calls += 1

    async def served() -> int:
        """The serial number of the certificate that the agent shows to whoever comes."""
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", rig.agent.port), timeout=30)
        return x509.load_pem_x509_certificate(shown.encode()).serial_number

    async with asyncio.timeout(60), rig.open(rig.target) as held, asyncio.TaskGroup() as tasks:
        stream = NodeAgentStub(held).WatchNode(pb.WatchNodeRequest(period_s=0.1))
        await stream.read()
        clients = [tasks.create_task(load()) for _ in range(2)]
        seen = {await served()}
        for _ in range(_RENEWALS):
            rig.agent_side.renew(_LIFETIME_S)
            rig.operator_side.renew(_LIFETIME_S)
            before = calls
            while calls < before + 2 * len(clients):
                # A call that began before the renewal may end after it.
                await asyncio.sleep(0)
            seen.add(await served())
            assert isinstance(await stream.read(), pb.NodeStatus)
        ended.set()
    assert len(seen) == 1 + _RENEWALS
    assert calls >= _RENEWALS * 4


async def test_authorities_are_replaced_by_way_of_both(rig: Rig) -> None:
    newer = Authority("agents again")
    newcomer = Side(rig.folder / "newcomer", rig.operators, newer)
    rig.operator_side.authority.write_bytes(rig.agents.pem + newer.pem)
    assert await rig.call() == "node-1"
    rig.agent_side.put(*newer.issue())
    assert await rig.call() == "node-1"
    rig.operator_side.authority.write_bytes(newer.pem)
    assert await rig.call() == "node-1"
    assert await rig.call(rig.channels(newcomer)) == "node-1"


async def test_broken_files_on_either_side_leave_the_earlier_ones(rig: Rig) -> None:
    for side in (rig.agent_side, rig.operator_side):
        side.certificate.write_bytes(side.certificate.read_bytes()[:200])
        assert await rig.call() == "node-1"
        side.key.unlink()
        assert await rig.call() == "node-1"


@pytest.mark.parametrize(
    "stranger",
    [
        lambda rig: rig.channels(Side(rig.folder / "foreign", rig.strangers, rig.agents)),
        lambda rig: rig.channels(Side(rig.folder / "expired", rig.operators, rig.agents, -60)),
        lambda rig: lambda target: grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(rig.agents.pem)),
        lambda _: grpc.aio.insecure_channel,
    ],
    ids=["foreign", "expired", "without a certificate", "without TLS"],
)
async def test_an_agent_says_nothing_to_who_has_no_good_certificate(
    rig: Rig, stranger: Callable[[Rig], OpenChannel]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.call(stranger(rig))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert await rig.call() == "node-1"


async def test_an_agent_that_refuses_the_operator_is_told_apart(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    expired = rig.channels(Side(rig.folder / "expired", rig.operators, rig.agents, -60))
    assert "expired/tls.crt: certificate has expired: the other side will refuse it" in caplog.text
    assert "it may refuse this operator's certificate" in await rig.why_not(expired)


async def test_an_agents_certificate_that_is_refused_is_told_with_the_reason(rig: Rig) -> None:
    rig.agent_side.put(*rig.strangers.issue())
    why = await rig.why_not(rig.open)
    assert why == (
        "its TLS certificate is refused here: CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"
    )


async def test_an_agent_whose_certificate_has_expired_starts_and_is_refused_until_it_is_renewed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.agent_side.renew(-60)
    rig.agent = rig.another("late")
    async with rig.agent:
        assert "certificate has expired" in await rig.why_not(rig.open)
        assert "agent/tls.crt: certificate has expired: the other side will refuse it" in caplog.text
        rig.agent_side.renew()
        assert await rig.call() == "node-1"


async def test_an_agent_with_files_of_no_use_does_not_start(rig: Rig) -> None:
    rig.agent_side.key.write_bytes(rig.operator_side.key.read_bytes())
    with pytest.raises(CannotStart, match="certificate and key cannot be read, or do not fit"):
        await rig.another("broken").start()
