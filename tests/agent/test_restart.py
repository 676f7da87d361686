"""An agent goes and another comes: engines serve on, are found again, and nothing that was asked for is forgotten."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil
import pytest

from agent.rig import EngineFiles, cpu, end_engines, gpu, rig, spec
from agent.test_supervision import http_answers
from tidelane.agent.engine_process import members
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.node_agent_pb2 import NodeStatus, ReplicaStatus
from tidelane.rpc.node_agent_pb2_grpc import NodeAgentStub
from tidelane.rpc.wire import spec_to_wire

pytestmark = pytest.mark.slow  # real processes, dozens of them

_MAIN = """
import argparse, sys
from tidelane.cli import agent
parser = argparse.ArgumentParser()
agent.register(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""


@dataclass
class AgentProcess:
    process: asyncio.subprocess.Process
    stub: NodeAgentStub

    async def serving(self) -> ReplicaStatus:
        async with asyncio.timeout(60):
            call = self.stub.WatchNode(node_agent_pb2.WatchNodeRequest(), wait_for_ready=True)
            try:
                async for node in call:
                    for replica in node.replicas:
                        if replica.phase == ReplicaStatus.READY and replica.serving_generation == replica.generation:
                            return replica
            finally:
                call.cancel()
        raise AssertionError("the stream ended")


@asynccontextmanager
async def agent_process(folder: Path, files: EngineFiles, *flags: str) -> AsyncIterator[AgentProcess]:
    """The real command. Whatever the test does to it, it is gone afterwards; its engines are not."""
    socket = f"unix:{folder}/agent.sock"
    command = [sys.executable, "-c", _MAIN, "agent", "--listen", socket, "--state-dir", str(folder / "state")]
    command += ["--engine-command", " ".join(files.command), "--node-name", "node-1", *flags]
    process = await asyncio.create_subprocess_exec(*command)
    channel = grpc.aio.insecure_channel(socket, options=(("grpc.use_local_subchannel_pool", 1),))
    try:
        yield AgentProcess(process, NodeAgentStub(channel))
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_an_agent_killed_finds_its_engine_again_which_served_all_the_while(tmp_path: Path) -> None:
    files = EngineFiles(tmp_path)
    try:
        async with agent_process(tmp_path, files) as first:
            request = node_agent_pb2.ApplyReplicaRequest(spec=spec_to_wire(spec()))
            await first.stub.ApplyReplica(request, wait_for_ready=True)
            before = await first.serving()
            first.process.kill()
            await first.process.wait()
        assert await http_answers(before.host, before.port)
        async with agent_process(tmp_path, files) as second:
            after = await second.serving()
            assert after.engine.pid == before.engine.pid
            assert after.port == before.port
            assert after.ready_since_unix_s == before.ready_since_unix_s
            assert len(files.journal("started")) == 1
            # An adopted engine is watched like one of our own.
            os.kill(after.engine.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while (again := await second.serving()).engine.pid == before.engine.pid:
                    pass
            assert again.restarts == 1
            assert again.port == before.port
            second.process.send_signal(signal.SIGTERM)
            assert await second.process.wait() == 0
        assert await http_answers(again.host, again.port)
    finally:
        end_engines(tmp_path / "state")


async def test_sigterm_with_stop_engines_drains_them(tmp_path: Path) -> None:
    files = EngineFiles(tmp_path)
    try:
        async with agent_process(tmp_path, files, "--stop-engines") as agent:
            request = node_agent_pb2.ApplyReplicaRequest(spec=spec_to_wire(spec()))
            await agent.stub.ApplyReplica(request, wait_for_ready=True)
            status = await agent.serving()
            agent.process.send_signal(signal.SIGTERM)
            assert await agent.process.wait() == 0
        assert len(files.journal("drain")) == 1
        assert [e["code"] for e in files.journal("ended")] == [0]
        assert not psutil.pid_exists(status.engine.pid)
    finally:
        end_engines(tmp_path / "state")


async def test_a_second_agent_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _MAIN, "agent", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        assert process.returncode == 1
        expected = (
            f"tidelane agent: state folder {tmp_path}/state: process {os.getpid()} is using it; "
            "end that first, or give another --state-dir"
        )
        assert errors.decode().splitlines()[-1] == expected


async def test_an_engine_that_died_meanwhile_is_started_again_on_its_port(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.close()
        os.kill(before.engine.pid, signal.SIGKILL)
        await r.open()
        after = await r.replica(lambda s: s.phase == ReplicaStatus.READY and s.engine.pid != before.engine.pid)
        assert after.port == before.port


async def test_an_objective_is_sent_again_above_the_one_in_force(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        await r.apply(spec(generation=2, tpot_s=0.04))
        await r.apply(spec(generation=3, tpot_s=0.03))
        before = await r.serving(generation=3)
        await r.restart()
        after = await r.replica(lambda s: s.engine.objective_revision > before.engine.objective_revision)
        assert after.engine.pid == before.engine.pid
        assert r.files.journal("objective")[-1]["tpot_s"] == 0.03


@pytest.mark.slow
async def test_a_removal_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(drain_takes_s=30)
        await r.apply(spec())
        await r.serving()
        await r.remove(spec().ref, drain_s=2)
        await r.in_phase(ReplicaStatus.DRAINING)
        await r.restart()
        await r.gone()
        await r.restart()
        assert not (await r.until(lambda _: True)).replicas


@pytest.mark.slow
async def test_a_process_killed_between_start_and_note_is_ended_not_doubled(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.close()
        launch = r.folder(spec()) / "launch.json"
        document = json.loads(launch.read_text())
        del document["process"]
        launch.write_text(json.dumps(document))
        await r.open()
        after = await r.replica(lambda s: s.phase == ReplicaStatus.READY and s.engine.pid != before.engine.pid)
        pids = {member.pid for member in members(r.folder(spec()))}
        assert before.engine.pid not in pids
        assert after.engine.pid in pids


async def test_a_process_with_the_noted_pid_but_another_start_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.close()
        end_engines(tmp_path / "state")
        launch = r.folder(spec()) / "launch.json"
        document = json.loads(launch.read_text())
        document["process"]["pid"] = os.getpid()
        launch.write_text(json.dumps(document))
        await r.open()
        after = await r.replica(lambda s: s.phase == ReplicaStatus.READY)
        assert after.engine.pid not in (os.getpid(), before.engine.pid)
        assert after.restarts == 0


async def test_damaged_state_is_moved_aside_and_a_running_engine_keeps_its_claim(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0)) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.close()
        state = tmp_path / "state" / "state.json"
        state.write_text(state.read_text()[:40])
        await r.open()
        after = await r.serving()
        assert after.engine.pid == before.engine.pid
        [aside] = (tmp_path / "state").glob("state.json.damaged-*")
        assert len(aside.read_text()) == 40
        node = await r.until(lambda _: True)
        assert [h.service for h in node.devices[0].held_by] == ["chat"]
        # And it is whole again for the next start.
        await r.restart()
        assert (await r.serving()).engine.pid == before.engine.pid


async def test_an_engine_that_nobody_can_account_for_is_ended(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0)) as r:
        await r.apply(spec())
        await r.serving()
        folder = r.folder(spec())
        await r.close()
        (tmp_path / "state" / "state.json").write_text("{")
        (folder / "launch.json").write_text("{")
        await r.open()
        assert not list(members(folder))
        assert not folder.exists()
        node = await r.until(lambda _: True)
        assert not node.replicas
        await r.apply(spec("other"))
        await r.serving(name="other")


async def test_state_of_a_newer_agent_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    text = json.dumps({"version": 2, "replicas": []})
    (tmp_path / "state" / "state.json").write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _MAIN, "agent", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1] == "tidelane agent: state version 2 is of a newer agent; this one knows 1"
    assert (tmp_path / "state" / "state.json").read_text() == text


async def test_the_agent_instance_changes_and_the_desired_state_does_not(tmp_path: Path) -> None:
    async with rig(tmp_path, cpu(slots=2)) as r:
        await r.apply(spec("one", generation=4))
        await r.apply(spec("two", generation=7))
        before = await r.until(lambda n: all(x.phase == ReplicaStatus.READY for x in n.replicas))
        await r.restart()
        after = await r.until(lambda n: all(x.phase == ReplicaStatus.READY for x in n.replicas))
        assert after.agent_instance != before.agent_instance
        assert _told(after) == _told(before)


def _told(node: NodeStatus) -> list[tuple[str, int, int, int]]:
    return [(r.id.service, r.generation, r.port, r.engine.pid) for r in node.replicas]
