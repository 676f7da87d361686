"""The fake engine keeps the contract, so that tests against it mean something."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from google.protobuf import json_format

from agent.engine_control_contract import EngineControlContract, RunningEngine, StartEngine, objective


class TestFakeEngine(EngineControlContract):
    @pytest.fixture
    async def start_engine(self, tmp_path: Path) -> AsyncIterator[StartEngine]:
        started: list[asyncio.subprocess.Process] = []

        async def start(extra: Sequence[str]) -> RunningEngine:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            command = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
            command += ["--switches", str(tmp_path / "switches"), "--journal", str(tmp_path / "journal")]
            command += ["--model", "builtin://fake", "--served-name", "fake", "--host", "127.0.0.1"]
            command += ["--port", str(port), "--control-socket", str(tmp_path / "control")]
            command += ["--objective", json_format.MessageToJson(objective(revision=1)), *extra]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
            started.append(process)
            return RunningEngine(process, tmp_path / "control", "127.0.0.1", port, initial_revision=1)

        yield start
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()
