"""The agents, seen from the operator: a watch on each that is kept alive, and the state of every node heard of."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from tidelane.operator.errors import CannotRun, Deposed, NoRoom, Retry
from tidelane.operator.node_state import Change, compare, node_of, with_replica
from tidelane.operator.observation import Node
from tidelane.rpc import node_agent_pb2 as pb
from tidelane.rpc.node_agent_pb2_grpc import NodeAgentStub
from tidelane.rpc.tls_files import TlsFiles
from tidelane.rpc.wire import ReplicaRef, ReplicaSpec, ref_to_wire, spec_to_wire

log = logging.getLogger(__name__)

_PERIOD_S: Final = 2.0
# An agent that says nothing for so long is treated as gone, though its connection looks alive.
_SILENCE_S: Final = 3 * _PERIOD_S + 2
_CALL_TIMEOUT_S: Final = 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 15.0

# gRPC's words for a handshake that failed here, and for one that failed there, where TLS 1.3 tells us nothing more.
_NO_CONNECTION: Final = "failed to connect to all addresses; last error: "
_NOT_TRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_CLOSED: Final = "Socket closed"

OpenChannel = Callable[[str], grpc.aio.Channel]

# A machine that vanishes without a word is noticed between two messages too.
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """PEM files: the CA that signed the agents' certificates, and what the operator shows them.

    `agent_name` is the name in these certificates; None: the host by which each agent is reached.
    """

    agent_ca: Path
    certificate: Path
    key: Path
    agent_name: str | None = None


def plain_channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


def tls_channels(paths: TlsPaths) -> OpenChannel:
    """Channels with mutual TLS. Files are read anew for each channel, so that renewed ones are taken up.

    Raises ValueError if they are of no use.
    """
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", paths.agent_name)) if paths.agent_name else _OPTIONS
    files = TlsFiles(paths.certificate, paths.key, paths.agent_ca)

    def open_channel(target: str) -> grpc.aio.Channel:
        pem = files.current()
        credentials = grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)
        return grpc.aio.secure_channel(target, credentials, options=options)

    return open_channel


@dataclass(slots=True)
class _Heard:
    """What one agent last said. `lost_at_s` None: it is connected."""

    target: str
    stub: NodeAgentStub
    status: pb.NodeStatus
    node: Node
    lost_at_s: float | None = None


class AgentPool:
    """Follows agents by their addresses. `changed` hears the node's name and what is new there.

    No agent is told anything unless `may_act`: that raises Deposed instead.
    """

    def __init__(
        self,
        open_channel: OpenChannel,
        clock: Callable[[], float],
        changed: Callable[[str, Change], None],
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        self._open_channel = open_channel
        self._may_act = may_act
        self._clock = clock
        self._changed = changed
        self._heard: dict[str, _Heard] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        # Addresses not tried yet; with hundreds of them the first round takes a while.
        self._untried: set[str] = set()
        self._tried_s: float | None = None
        # By address, why the last try to connect failed.
        self._unreached: dict[str, str] = {}

    def follow(self, targets: Iterable[str]) -> None:
        """Exactly these from now on."""
        wanted = set(targets)
        self._untried &= wanted
        for target in self._followers.keys() - wanted:
            follower = self._followers.pop(target)
            self._unreached.pop(target, None)
            follower.cancel()
            self._ending.add(follower)
            follower.add_done_callback(self._ending.discard)
        self._untried |= wanted - self._followers.keys()
        for target in wanted - self._followers.keys():
            self._followers[target] = asyncio.create_task(self._follow(target), name=f"follow {target}")
        self._note_tried()

    async def close(self) -> None:
        self.follow(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    @property
    def dead_followers(self) -> Sequence[str]:
        """Addresses that nobody follows any more though somebody should; always empty unless there is a bug."""
        return [target for target, task in self._followers.items() if task.done()]

    @property
    def watching_for_s(self) -> float:
        """Since each agent was first heard, or could not be: before that, silence says nothing about a node."""
        return 0.0 if self._tried_s is None else self._clock() - self._tried_s

    @property
    def unreached(self) -> Mapping[str, str]:
        """By address of an agent that is not connected, why."""
        return self._unreached

    def nodes(self) -> Mapping[str, Node]:
        """Every node heard of, as it was last heard."""
        return {name: self._seen(heard) for name, heard in self._heard.items()}

    async def apply(self, node_name: str, spec: ReplicaSpec) -> None:
        """Raises NoRoom, CannotRun or Retry."""
        heard = self._connected(node_name)
        try:
            request = pb.ApplyReplicaRequest(spec=spec_to_wire(spec))
            replica = await heard.stub.ApplyReplica(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, node_name) from error
        # Known at once: the next plan must not take the room for free, nor the replica for missing.
        self._update(node_name, heard, with_replica(heard.status, replica))

    async def remove(self, node_name: str, ref: ReplicaRef, drain_deadline_s: float) -> None:
        """Raises Retry."""
        request = pb.RemoveReplicaRequest(id=ref_to_wire(ref), drain_deadline_s=drain_deadline_s)
        try:
            await self._connected(node_name).stub.RemoveReplica(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise Retry(f"agent of {node_name}: {error.details()}") from error

    def _seen(self, heard: _Heard) -> Node:
        if heard.lost_at_s is None:
            return heard.node
        return heard.node.lost(self._clock() - heard.lost_at_s)

    def _connected(self, node_name: str) -> _Heard:
        heard = self._heard.get(node_name)
        if heard is None or heard.lost_at_s is not None:
            raise Retry(f"agent of {node_name} is not connected")
        if not self._may_act():
            raise Deposed(f"agent of {node_name}: another operator may act by now")
        return heard

    async def _follow(self, target: str) -> None:
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                try:
                    await self._listen(target)
                except (grpc.aio.AioRpcError, TimeoutError, _NameTaken, ValueError) as error:
                    log.warning("agent %s: %s", target, _shown(error))
                    self._note_unreached(target, _shown(error))
                self._note_tried(target)
                if self._lose(target):
                    delay_s = _FIRST_DELAY_S
                # Spread, or every watch that a network fault broke would come back in one moment.
                await asyncio.sleep(delay_s * random.uniform(0.75, 1.25))
                delay_s = min(_LONGEST_DELAY_S, delay_s * 2)
        finally:
            self._lose(target)

    def _note_tried(self, *targets: str) -> None:
        self._untried.difference_update(targets)
        if not self._untried and self._tried_s is None:
            self._tried_s = self._clock()

    def _note_unreached(self, target: str, why: str) -> None:
        news = self._unreached.get(target) != why
        self._unreached[target] = why
        if news and all(each.lost_at_s is not None for each in self._heard.values()):
            # Services wait for any agent at all, and say why there is none.
            self._changed("", Change(room=True))

    async def _listen(self, target: str) -> None:
        async with self._open_channel(target) as channel:
            stub = NodeAgentStub(channel)
            stream = stub.WatchNode(pb.WatchNodeRequest(period_s=_PERIOD_S))
            while True:
                # Not wait_for, which in Python 3.11 loses a cancellation that comes together with a message.
                async with asyncio.timeout(_SILENCE_S):
                    status = await stream.read()
                if not isinstance(status, pb.NodeStatus):
                    return  # the end of the stream
                self._note_tried(target)
                self._unreached.pop(target, None)
                known = self._heard.get(status.node_name)
                if known and known.target != target and known.lost_at_s is None:
                    raise _NameTaken(f"node name {status.node_name} is taken by the agent at {known.target}")
                if known and known.stub is stub and known.lost_at_s is None and known.status == status:
                    continue  # Most messages of a steady node say only that it is there.
                self._update(status.node_name, _Heard(target, stub, status, node_of(status)), status)

    def _update(self, node_name: str, heard: _Heard, status: pb.NodeStatus) -> None:
        before = self._heard.get(node_name)
        after = _Heard(heard.target, heard.stub, status, node_of(status))
        self._heard[node_name] = after
        change = compare(self._seen(before) if before else None, after.node)
        if change:
            self._changed(node_name, change)

    def _lose(self, target: str) -> bool:
        """Whether it was connected."""
        for name, heard in self._heard.items():
            if heard.target == target and heard.lost_at_s is None:
                heard.lost_at_s = self._clock()
                self._changed(name, Change.everything(heard.node))
                return True
        return False


class _NameTaken(Exception):
    """Two agents go by one node name."""


def _meaning(error: grpc.aio.AioRpcError, node_name: str) -> NoRoom | CannotRun | Retry:
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return NoRoom(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return CannotRun(details)
        case _:
            return Retry(f"agent of {node_name}: {error.code().name}: {details}")


def _shown(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or type(error).__name__
    details = (error.details() or "").removeprefix(_NO_CONNECTION)
    _, refused, why = details.partition(_NOT_TRUSTED)
    if refused:
        return f"its TLS certificate is refused here: {_NOT_TRUSTED}{why.removesuffix(': OK')}"
    if details.endswith(_CLOSED):
        return (
            f"{error.code().name}: {details}; with TLS, it may refuse this operator's certificate, as its log then says"
        )
    return f"{error.code().name}: {details}"
