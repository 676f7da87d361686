"""The agent as a gRPC server and as a process: listening safely, health and reflection, signals, coming and going."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health_aio  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from tidelane.agent.devices import DeviceInventory
from tidelane.agent.errors import CannotStart
from tidelane.agent.footprint import StoredWeights, Weights
from tidelane.agent.node import Node, NodeSettings
from tidelane.agent.service import NodeAgentService
from tidelane.agent.state import StateFolder
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.node_agent_pb2_grpc import add_NodeAgentServicer_to_server
from tidelane.rpc.tls_files import Pem, TlsFiles

log = logging.getLogger(__name__)

SERVICE = node_agent_pb2.DESCRIPTOR.services_by_name["NodeAgent"].full_name
_STOP_GRACE_S = 1.0
_OPTIONS = (
    # A watcher whose machine vanished without a word is noticed and its stream ended.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Two agents must not share a port by accident.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """PEM files, read anew as they change. Clients must show a certificate that `client_ca` signed."""

    certificate: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True, slots=True)
class AgentSettings:
    node: NodeSettings
    state_folder: Path
    listen: str = "127.0.0.1:50061"
    tls: TlsPaths | None = None
    # Without TLS anyone who reaches the port may run models from anywhere on this node.
    insecure: bool = False
    # Engines are stopped with the agent, after draining so long; None: they go on without it.
    stop_engines_after_s: float | None = None


class Agent:
    """A running agent: `async with Agent(...)`, or `start` and `stop`. Raises CannotStart."""

    def __init__(
        self,
        settings: AgentSettings,
        inventory: DeviceInventory,
        weights: Weights | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._inventory = inventory
        self._weights = weights or StoredWeights(settings.node.model_store or Path("/nonexistent"))
        self._clock = clock
        self._wall_clock = wall_clock
        self.port = 0

    async def __aenter__(self) -> Agent:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        server = grpc.aio.server(options=_OPTIONS)
        # Before the state folder: an agent that cannot listen must not disturb what runs.
        self.port = _bind(server, self._settings)
        try:
            state = StateFolder(self._settings.state_folder)
            self.node = Node(self._settings.node, state, self._inventory, self._weights, self._clock, self._wall_clock)
            try:
                await self.node.start()
            except BaseException:
                state.close()
                raise
            add_NodeAgentServicer_to_server(NodeAgentService(self.node), server)
            self._health = health_aio.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
            await server.start()
        except BaseException:
            await server.stop(None)
            raise
        self._server = server
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info("agent listens node=%s port=%d", self._settings.node.name, self.port)

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self.node.stop(self._settings.stop_engines_after_s)
        await self._server.stop(_STOP_GRACE_S)


async def run_agent(settings: AgentSettings, inventory: DeviceInventory) -> None:
    """Until SIGTERM or SIGINT. Raises CannotStart, or what broke the agent."""
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    async with Agent(settings, inventory) as agent:
        ending = asyncio.create_task(asked_to_end.wait())
        await asyncio.wait((ending, agent.node.broken), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if agent.node.broken.done():
            agent.node.broken.result()


def _bind(server: grpc.aio.Server, settings: AgentSettings) -> int:
    listen = settings.listen
    try:
        if settings.tls:
            return server.add_secure_port(listen, _credentials(settings.tls))
        if not (is_loopback(listen) or settings.insecure):
            raise CannotStart(
                f"listening on {listen} without TLS would let anyone who reaches it run engines here: "
                "give --tls-cert, --tls-key and --tls-client-ca, or say --insecure"
            )
        return server.add_insecure_port(listen)
    except RuntimeError as error:
        raise CannotStart(f"cannot listen on {listen}: {error}") from error


def is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    if listen.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _credentials(paths: TlsPaths) -> grpc.ServerCredentials:
    try:
        files = TlsFiles(paths.certificate, paths.key, paths.client_ca)
    except ValueError as error:
        raise CannotStart(str(error)) from error

    given = files.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        pem = files.current()
        if pem == given:
            return None
        given = pem
        return _configuration(pem)

    # gRPC asks before each handshake, and not on our event loop.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        renewed,  # type: ignore[arg-type]  # the stubs forget None, which is for no change
        require_client_authentication=True,
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority)
