"""`tidelane sketch`: what traffic is like, of a trace or of a running engine, in a small file to simulate by."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tidelane.cli.targets import BadOption
from tidelane.cli.traces import FORMAT_HELP, replayed

_DESCRIPTION = """Prints how often requests come, in what bursts, and how long prompts, answers and reused beginnings
are, as JSON for tidelane simulate --sketch. It holds no prompt and no single request."""
_ANSWER_LIMIT_S = 10.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("sketch", help="print what traffic is like", description=_DESCRIPTION)
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="of these requests")
    add("--format", metavar="FORMAT", help=FORMAT_HELP)
    add("--engine", type=Path, metavar="SOCKET", help="of the last minutes at the engine with this control socket")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        if (args.trace is None) == (args.engine is None):
            raise BadOption("give --trace or --engine, one of the two")
        print(_of_engine(args.engine) if args.trace is None else _of_trace(args.trace, args.format))
    except (ValueError, OSError) as error:
        print(f"tidelane sketch: {error}", file=sys.stderr)
        return 2
    return 0


def _of_trace(path: Path, form: str | None) -> str:
    from google.protobuf.json_format import MessageToJson

    from tidelane.engine.sim.synthetic import sketch_of
    from tidelane.rpc.wire import Workload, workload_to_wire

    traffic, _ = replayed(path, form, None, 0)
    return MessageToJson(workload_to_wire(Workload(sketch_of(traffic))))


def _of_engine(socket: Path) -> str:
    import asyncio

    import grpc.aio
    from google.protobuf.json_format import MessageToJson

    from tidelane.rpc import serving_pb2
    from tidelane.rpc.serving_pb2_grpc import EngineStub

    async def first() -> serving_pb2.EngineStatus:
        async with grpc.aio.insecure_channel(f"unix://{socket.absolute()}") as channel:
            asked = serving_pb2.WatchStatusRequest(period_s=60)
            async for status in EngineStub(channel).WatchStatus(asked, timeout=_ANSWER_LIMIT_S):
                return status
        return serving_pb2.EngineStatus()

    try:
        status = asyncio.run(first())
    except grpc.aio.AioRpcError as error:
        raise BadOption(f"--engine: {socket}: {error.details()}") from error
    if not status.HasField("workload"):
        raise BadOption(f"--engine: {socket}: no request came there in the last minutes")
    return MessageToJson(status.workload)
