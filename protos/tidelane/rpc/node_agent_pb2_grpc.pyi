from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import grpc
import grpc.aio
import tidelane.rpc.node_agent_pb2

class NodeAgentStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    ApplyReplica: grpc.aio.UnaryUnaryMultiCallable[tidelane.rpc.node_agent_pb2.ApplyReplicaRequest, tidelane.rpc.node_agent_pb2.ReplicaStatus]
    RemoveReplica: grpc.aio.UnaryUnaryMultiCallable[tidelane.rpc.node_agent_pb2.RemoveReplicaRequest, tidelane.rpc.node_agent_pb2.RemoveReplicaResponse]
    WatchNode: grpc.aio.UnaryStreamMultiCallable[tidelane.rpc.node_agent_pb2.WatchNodeRequest, tidelane.rpc.node_agent_pb2.NodeStatus]

class NodeAgentServicer:
    def ApplyReplica(self, request: tidelane.rpc.node_agent_pb2.ApplyReplicaRequest, context: Any) -> tidelane.rpc.node_agent_pb2.ReplicaStatus | Awaitable[tidelane.rpc.node_agent_pb2.ReplicaStatus]: ...
    def RemoveReplica(self, request: tidelane.rpc.node_agent_pb2.RemoveReplicaRequest, context: Any) -> tidelane.rpc.node_agent_pb2.RemoveReplicaResponse | Awaitable[tidelane.rpc.node_agent_pb2.RemoveReplicaResponse]: ...
    def WatchNode(self, request: tidelane.rpc.node_agent_pb2.WatchNodeRequest, context: Any) -> Iterator[tidelane.rpc.node_agent_pb2.NodeStatus] | AsyncIterator[tidelane.rpc.node_agent_pb2.NodeStatus]: ...

def add_NodeAgentServicer_to_server(
    servicer: NodeAgentServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...
