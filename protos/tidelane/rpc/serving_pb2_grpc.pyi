from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import grpc
import grpc.aio
import tidelane.rpc.serving_pb2

class EngineStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    WatchStatus: grpc.aio.UnaryStreamMultiCallable[tidelane.rpc.serving_pb2.WatchStatusRequest, tidelane.rpc.serving_pb2.EngineStatus]
    SetObjective: grpc.aio.UnaryUnaryMultiCallable[tidelane.rpc.serving_pb2.Objective, tidelane.rpc.serving_pb2.SetObjectiveResponse]
    Drain: grpc.aio.UnaryUnaryMultiCallable[tidelane.rpc.serving_pb2.DrainRequest, tidelane.rpc.serving_pb2.DrainResponse]

class EngineServicer:
    def WatchStatus(self, request: tidelane.rpc.serving_pb2.WatchStatusRequest, context: Any) -> Iterator[tidelane.rpc.serving_pb2.EngineStatus] | AsyncIterator[tidelane.rpc.serving_pb2.EngineStatus]: ...
    def SetObjective(self, request: tidelane.rpc.serving_pb2.Objective, context: Any) -> tidelane.rpc.serving_pb2.SetObjectiveResponse | Awaitable[tidelane.rpc.serving_pb2.SetObjectiveResponse]: ...
    def Drain(self, request: tidelane.rpc.serving_pb2.DrainRequest, context: Any) -> tidelane.rpc.serving_pb2.DrainResponse | Awaitable[tidelane.rpc.serving_pb2.DrainResponse]: ...

def add_EngineServicer_to_server(
    servicer: EngineServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...
