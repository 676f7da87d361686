"""An engine without a model: a real process with the flags, the control service, the exit codes and the two-process
shape of `tidelane serve`, which misbehaves as a file of switches says.

    fake_engine.py --switches FILE --journal FILE <flags of tidelane serve>

The journal gets one JSON line per thing that happened, for tests to read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

CANNOT_RUN = 78
_LOOK_EVERY_S = 0.02


@dataclass
class Switches:
    """What to do wrong. Read at the start and whenever the file changes, except what is only about starting."""

    exit_at_start: int | None = None
    says_nothing: bool = False  # never opens its control socket
    load_s: float = 0.0
    deaf_to_drain: bool = False
    refuses_objective: bool = False
    stubborn_front: bool = False  # outlives the engine
    drain_takes_s: float = 0.0
    exit_now: int | None = None
    stuck: bool = False  # the whole process stops answering
    latency: dict[str, float] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Switches:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(self.__dict__))
        beside.replace(path)


class FakeEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        from google.protobuf import json_format

        from tidelane.rpc import serving_pb2

        self.args = args
        self.pb = serving_pb2
        self.state = serving_pb2.EngineStatus.LOADING
        self.objective = json_format.Parse(args.objective, serving_pb2.Objective())
        self.switches = Switches.read(args.switches)
        self.changed = asyncio.Condition()
        self.end = asyncio.Event()
        self.draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        import grpc.aio

        from tidelane.rpc.serving_pb2_grpc import EngineServicer, add_EngineServicer_to_server

        engine = self

        class Service(EngineServicer):
            @override
            async def WatchStatus(self, request: Any, context: Any) -> AsyncIterator[Any]:
                if not 0 <= request.period_s < float("inf"):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "period_s")
                while True:
                    yield engine.status()
                    async with engine.changed:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(request.period_s or 1.0):
                                await engine.changed.wait()

            @override
            async def SetObjective(self, request: Any, context: Any) -> Any:
                await engine.set_objective(request, context)
                return engine.pb.SetObjectiveResponse()

            @override
            async def Drain(self, request: Any, context: Any) -> Any:
                engine.record("drain", deadline_s=request.deadline_s)
                if not engine.switches.deaf_to_drain:
                    engine.draining = asyncio.create_task(engine.drain(request.deadline_s))
                return engine.pb.DrainResponse()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.end.set)
        server = grpc.aio.server()
        add_EngineServicer_to_server(Service(), server)
        server.add_insecure_port(f"unix://{self.args.control_socket}")
        await server.start()
        watching = asyncio.create_task(self.watch_switches())
        front = await self.load()
        ended = asyncio.create_task(self.end.wait())
        fronting = asyncio.create_task(asyncio.to_thread(front.wait))
        await asyncio.wait((ended, fronting), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        code = 0 if self.end.is_set() else 1
        assert front.stdin is not None
        front.stdin.close()
        if not self.switches.stubborn_front:
            await fronting
        await server.stop(0.2)
        self.record("ended", code=code)
        return code

    async def load(self) -> subprocess.Popen[bytes]:
        await asyncio.sleep(self.switches.load_s)
        command = [sys.executable, __file__, "--front", self.args.host, str(self.args.port)]
        command.append("stubborn" if self.switches.stubborn_front else "dutiful")
        front = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert front.stdout is not None
        if not await asyncio.to_thread(front.stdout.readline):
            raise SystemExit(1)
        if self.state == self.pb.EngineStatus.LOADING:
            await self.enter(self.pb.EngineStatus.READY)
        return front

    async def enter(self, state: Any) -> None:
        self.state = state
        async with self.changed:
            self.changed.notify_all()

    async def set_objective(self, objective: Any, context: Any) -> None:
        import grpc

        from tidelane.rpc.wire import objective_from_wire

        if self.switches.refuses_objective:
            self.record("refused", revision=objective.revision)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not while it runs")
        try:
            objective_from_wire(objective)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if objective.revision < self.objective.revision:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "an older revision")
        self.objective = objective
        self.record("objective", revision=objective.revision, tpot_s=objective.slo.tpot_s)
        await self.enter(self.state)

    async def drain(self, deadline_s: float) -> None:
        await self.enter(self.pb.EngineStatus.DRAINING)
        await asyncio.sleep(min(deadline_s, self.switches.drain_takes_s))
        self.end.set()

    async def watch_switches(self) -> None:
        while True:
            self.switches = switches = Switches.read(self.args.switches)
            if switches.exit_now is not None:
                os._exit(switches.exit_now)
            if switches.stuck:
                os.kill(os.getpid(), signal.SIGSTOP)
            await asyncio.sleep(_LOOK_EVERY_S)

    def status(self) -> Any:
        status = self.pb.EngineStatus(
            state=self.state,
            model_name=self.args.served_name,
            listen=f"{self.args.host}:{self.args.port}" if self.state == self.pb.EngineStatus.READY else "",
            objective_revision=self.objective.revision,
            pid=os.getpid(),
            resident_memory_bytes=1,
        )
        from google.protobuf import json_format

        if self.switches.latency:
            json_format.ParseDict(self.switches.latency, status.latency)
        if self.switches.workload:
            json_format.ParseDict(self.switches.workload, status.workload)
        return status

    def record(self, event: str, **values: Any) -> None:
        record(self.args.journal, event, **values)


def record(journal: Path, event: str, **values: Any) -> None:
    line = json.dumps({"event": event, "pid": os.getpid(), **values}) + "\n"
    with journal.open("a") as file:
        file.write(line)


def front(host: str, port: int, stubborn: bool) -> None:
    """The HTTP process: answers anything with 200, and ends when the engine's end of its pipe closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
            await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, host, port)
        print("listening", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        if stubborn:
            await asyncio.Event().wait()
        server.close()

    asyncio.run(serve())


def main() -> int:
    if sys.argv[1:2] == ["--front"]:
        front(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "stubborn")
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--switches", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    for flag in (
        "model",
        "model-store",
        "served-name",
        "host",
        "dtype",
        "objective",
        "cores",
        "log-level",
        "kv-disk-folder",
        "kv-dtype",
        "kv-idle-timeout",
    ):
        parser.add_argument(f"--{flag}")
    for flag in ("port", "max-context-tokens", "kv-pool-memory", "kv-host-memory", "kv-disk-memory", "queue-limit"):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--kv-prefetch", action="store_true")
    parser.add_argument("--control-socket", type=Path)
    args = parser.parse_args()
    switches = Switches.read(args.switches)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    record(args.journal, "started", arguments=sys.argv[5:], port=args.port, cores=args.cores, gpus=gpus)
    if args.model == "builtin://no-such-model":
        print("unknown built-in model 'no-such-model'")
        return CANNOT_RUN
    if switches.exit_at_start is not None:
        print(f"told to exit with {switches.exit_at_start}")
        return switches.exit_at_start
    while switches.says_nothing:
        time.sleep(60)

    async def run() -> int:
        return await FakeEngine(args).run()

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
