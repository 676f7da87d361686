"""The NodeAgent service: checks what comes in, asks the node, turns its refusals into status codes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from typing_extensions import override

from tidelane.agent.errors import AgentError, NoRoom, Outdated, Rejected, TryLater
from tidelane.agent.node import Node
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.node_agent_pb2_grpc import NodeAgentServicer
from tidelane.rpc.wire import ref_from_wire, spec_from_wire

_CODES: dict[type[AgentError], grpc.StatusCode] = {
    Rejected: grpc.StatusCode.INVALID_ARGUMENT,
    Outdated: grpc.StatusCode.FAILED_PRECONDITION,
    NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TryLater: grpc.StatusCode.UNAVAILABLE,
}
_PERIOD_S = 5.0
_SHORTEST_PERIOD_S = 0.1
_LONGEST_PERIOD_S = 60.0
_LONGEST_DRAIN_S = 24 * 3600.0
# An agent has one operator, perhaps two while one takes over, and people who look.
_MOST_WATCHERS = 64

Message = TypeVar("Message")
Parsed = TypeVar("Parsed")


class NodeAgentService(NodeAgentServicer):
    def __init__(self, node: Node) -> None:
        self._node = node

    @override
    async def ApplyReplica(
        self, request: node_agent_pb2.ApplyReplicaRequest, context: Any
    ) -> node_agent_pb2.ReplicaStatus:
        try:
            return await self._node.apply(_parsed(spec_from_wire, request.spec))
        except AgentError as error:
            await _refuse(context, error)

    @override
    async def RemoveReplica(
        self, request: node_agent_pb2.RemoveReplicaRequest, context: Any
    ) -> node_agent_pb2.RemoveReplicaResponse:
        try:
            drain_s = _seconds("drain_deadline_s", request.drain_deadline_s, _LONGEST_DRAIN_S)
            await self._node.remove(_parsed(ref_from_wire, request.id), drain_s)
        except AgentError as error:
            await _refuse(context, error)
        return node_agent_pb2.RemoveReplicaResponse()

    @override
    async def WatchNode(
        self, request: node_agent_pb2.WatchNodeRequest, context: Any
    ) -> AsyncIterator[node_agent_pb2.NodeStatus]:
        try:
            period_s = _seconds("period_s", request.period_s, math.inf)
            if self._node.watchers >= _MOST_WATCHERS:
                raise NoRoom(f"{_MOST_WATCHERS} watchers already")
        except AgentError as error:
            await _refuse(context, error)
        period_s = min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, period_s or _PERIOD_S))
        async for status in self._node.watch(period_s):
            yield status


def _parsed(parse: Callable[[Message], Parsed], message: Message) -> Parsed:
    try:
        return parse(message)
    except ValueError as error:
        raise Rejected(str(error)) from error


def _seconds(field: str, value: float, most: float) -> float:
    if not 0 <= value <= most:  # NaN fails this too.
        raise Rejected(f"{field}: {value} must lie between 0 and {most}")
    return value


async def _refuse(context: Any, error: AgentError) -> NoReturn:
    await context.abort(_CODES[type(error)], str(error))
    raise AssertionError("abort returns never")
