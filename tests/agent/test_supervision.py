"""Engines live and die under a real agent: fake engines, real processes, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from functools import partial
from pathlib import Path

import psutil
import pytest

from agent.rig import GIB, cpu, gpu, rig, spec
from tidelane.agent.engine_process import members
from tidelane.agent.lifecycle import Limits
from tidelane.rpc.node_agent_pb2 import ReplicaStatus
from tidelane.rpc.wire import KvCacheSpec, ShareBounds, objective_from_wire

pytestmark = pytest.mark.slow  # real processes, dozens of them


async def http_answers(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line.startswith(b"HTTP/1.1 200")


def restarted(times: int, status: ReplicaStatus) -> bool:
    return status.restarts == times


async def test_an_applied_replica_is_started_and_serves(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        first = await r.apply(spec())
        assert (first.generation, first.serving_generation, first.phase) == (1, 0, ReplicaStatus.STARTING)
        status = await r.serving()
        assert await http_answers(status.host, status.port)
        assert status.model_loaded
        assert status.ready_since_unix_s > 0
        assert status.restarts == 0
        assert list(status.device_ids) == ["cpu"]
        [started] = r.files.journal("started")
        assert started["pid"] == status.engine.pid
        assert started["cores"] == "0,1,2,3"
        assert started["gpus"] == ""


async def test_a_gpu_replica_sees_its_gpus_alone(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0), gpu(1), gpu(2)) as r:
        await r.apply(spec("one"))
        await r.apply(spec("two", devices=2))
        await r.serving(name="one")
        await r.serving(name="two")
        assert {s["gpus"]: s["cores"] for s in r.files.journal("started")} == {"GPU-0": None, "GPU-1,GPU-2": None}


async def test_removal_drains_and_leaves_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(drain_takes_s=0.3)
        await r.apply(spec())
        status = await r.serving()
        folder = r.folder(spec())
        await r.remove(spec().ref, drain_s=20)
        await r.in_phase(ReplicaStatus.DRAINING)
        node = await r.gone()
        assert not node.devices[0].held_by
        [drain] = r.files.journal("drain")
        assert 19 < drain["deadline_s"] <= 20
        assert [e["code"] for e in r.files.journal("ended")] == [0]
        assert not folder.exists()
        assert not list(members(folder))
        assert not await http_answers(status.host, status.port)


async def test_an_engine_deaf_to_its_drain_is_killed_after_the_deadline(tmp_path: Path) -> None:
    async with rig(tmp_path, limits=Limits(exit_grace_s=0.1, front_grace_s=0.1)) as r:
        r.files.switch(deaf_to_drain=True, stubborn_front=True)
        await r.apply(spec())
        await r.serving()
        folder = r.folder(spec())
        await r.remove(spec().ref, drain_s=0.2)
        await r.gone()
        assert not list(members(folder))
        assert len(r.files.journal("drain")) == 1


async def test_a_replica_removed_while_starting_goes(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(says_nothing=True)
        await r.apply(spec())
        await r.until(lambda _: bool(r.files.journal("started")))
        await r.remove(spec().ref, drain_s=30)
        await r.gone()


@pytest.mark.slow
async def test_killed_ten_times_it_comes_back_and_nothing_leaks(tmp_path: Path) -> None:
    async with rig(tmp_path, limits=Limits(front_grace_s=0.1)) as r:
        r.files.switch(stubborn_front=True)
        await r.apply(spec())
        status = await r.serving()
        here = psutil.Process()
        folder = r.folder(spec())
        ports, pids, descriptors, names = set(), set(), [], []
        for restarts in range(1, 11):
            ports.add(status.port)
            pids.add(status.engine.pid)
            os.kill(status.engine.pid, signal.SIGKILL)
            await r.replica(partial(restarted, restarts))
            status = await r.serving()
            descriptors.append(here.num_fds())
            names.append(sorted(path.name for path in folder.iterdir()))
            assert len(list(members(folder))) == 2  # this engine and its front, and no older one
            assert await http_answers(status.host, status.port)
        assert len(ports) == 1
        assert len(pids) == 10
        assert names == [["control", "engine.log", "launch.json"]] * 10
        assert max(descriptors[5:]) <= max(descriptors[:5]) + 1, descriptors
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []  # reaped, too


@pytest.mark.slow
async def test_a_killed_engine_leaves_ready_and_says_why(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        status = await r.serving()
        r.files.switch(load_s=1.0)
        os.kill(status.engine.pid, signal.SIGKILL)
        down = await r.replica(lambda s: s.phase != ReplicaStatus.READY)
        assert down.message.startswith("engine was ended by signal 9")
        assert down.serving_generation == 0
        assert down.ready_since_unix_s == 0
        back = await r.serving()
        assert back.restarts == 1
        assert back.message == ""
        assert back.ready_since_unix_s > status.ready_since_unix_s


async def test_exit_78_is_final_until_another_generation(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(exit_at_start=78)
        await r.apply(spec())
        failed = await r.in_phase(ReplicaStatus.FAILED)
        assert failed.message == "engine exited with code 78: told to exit with 78"
        again = await r.apply(spec())
        assert again.phase == ReplicaStatus.FAILED
        assert len(r.files.journal("started")) == 1
        r.files.switch()
        await r.apply(spec(generation=2))
        await r.serving(generation=2)
        assert len(r.files.journal("started")) == 2


async def test_other_exits_back_off(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(exit_at_start=3)
        await r.apply(spec())
        backing_off = await r.in_phase(ReplicaStatus.BACKING_OFF)
        assert backing_off.message == "engine exited with code 3: told to exit with 3"
        assert 0 < backing_off.restart_in_s <= 0.2
        await r.replica(lambda s: s.restarts >= 3)
        r.files.switch()
        assert (await r.serving()).restarts >= 3


async def test_a_front_that_dies_takes_the_engine_with_it_and_both_return(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        status = await r.serving()
        front = next(m.pid for m in members(r.folder(spec())) if m.pid != status.engine.pid)
        os.kill(front, signal.SIGKILL)
        back = await r.replica(lambda s: s.restarts == 1 and s.phase == ReplicaStatus.READY)
        assert back.port == status.port


@pytest.mark.slow
async def test_an_engine_that_stops_answering_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, limits=Limits(silence_s=1.5)) as r:
        await r.apply(spec())
        status = await r.serving()
        r.files.switch(stuck=True)
        await r.until(lambda _: psutil.Process(status.engine.pid).status() == psutil.STATUS_STOPPED)
        r.files.switch()
        down = await r.replica(lambda s: s.restarts == 1)
        assert down.message == "said nothing for 2 s"
        await r.replica(lambda s: s.phase == ReplicaStatus.READY and s.engine.pid != status.engine.pid)


async def test_an_engine_that_never_speaks_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, limits=Limits(first_word_s=1.0)) as r:
        r.files.switch(says_nothing=True)
        await r.apply(spec())
        await r.replica(lambda s: s.restarts == 1)
        r.files.switch()
        await r.serving()


@pytest.mark.slow
async def test_a_slow_start_is_waited_for_as_long_as_it_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path, limits=Limits(silence_s=2.5)) as r:
        r.files.switch(load_s=4.0)
        await r.apply(spec())
        assert (await r.serving()).restarts == 0


async def test_a_new_objective_reaches_the_running_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.apply(spec(generation=2, tpot_s=0.02))
        after = await r.serving(generation=2)
        assert after.engine.pid == before.engine.pid
        assert after.engine.objective_revision == before.engine.objective_revision + 1
        assert [o["tpot_s"] for o in r.files.journal("objective")] == [0.02]
        launched = json.loads((r.folder(spec()) / "launch.json").read_text())
        assert launched["spec"]["generation"] == "2"


async def test_another_objective_of_the_same_generation_reaches_the_running_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.replica(lambda s: s.serves_objective)
        assert objective_from_wire(before.objective) == spec().objective
        answer = await r.apply(spec(tpot_s=0.02))
        assert objective_from_wire(answer.objective) == spec(tpot_s=0.02).objective
        assert (answer.serves_objective, answer.serving_generation) == (False, 1)
        after = await r.replica(lambda s: s.serves_objective)
        assert after.engine.pid == before.engine.pid
        assert after.ready_since_unix_s == before.ready_since_unix_s
        await r.apply(spec(tpot_s=0.02))
        await r.restart()
        found = await r.replica(lambda s: s.serves_objective)
        assert objective_from_wire(found.objective) == spec(tpot_s=0.02).objective
        assert found.engine.pid == before.engine.pid
        assert {o["tpot_s"] for o in r.files.journal("objective")} == {0.02}
        assert len(r.files.journal("started")) == 1


async def test_of_the_same_generation_nothing_but_the_objective_is_taken(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.apply(spec(tpot_s=0.02, devices=8))
        after = await r.replica(lambda s: s.serves_objective and s.objective.slo.tpot_s == 0.02)
        assert after.engine.pid == before.engine.pid
        assert after.device_ids == before.device_ids


async def test_a_generation_that_changes_nothing_for_the_engine_is_served_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.apply(spec(generation=5))
        after = await r.serving(generation=5)
        assert after.engine.pid == before.engine.pid
        assert r.files.journal("objective") == []


async def test_an_objective_that_the_engine_cannot_take_live_starts_it_anew(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(refuses_objective=True)
        await r.apply(spec())
        before = await r.serving()
        await r.apply(spec(generation=2, tpot_s=0.02))
        after = await r.serving(generation=2)
        assert after.engine.pid != before.engine.pid
        assert after.restarts == 0


async def test_another_model_replaces_the_engine_after_a_drain_on_the_same_port(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        model = spec().model
        await r.apply(spec(generation=2, model=type(model)("builtin://other", "chat")))
        after = await r.serving(generation=2)
        assert after.engine.pid != before.engine.pid
        assert (before.running.model.source, before.running.generation) == (model.source, 1)
        assert (after.running.model.source, after.running.generation) == ("builtin://other", 2)
        assert after.port == before.port
        assert after.restarts == 0
        assert [e["code"] for e in r.files.journal("ended")] == [0]
        assert len(r.files.journal("drain")) == 1


async def test_kv_stays_on_disk_as_long_as_the_service_has_room_for_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec(kv_cache=KvCacheSpec(nvme_bytes=GIB)))
        await r.serving()
        kept = r.folder(spec()) / "kv" / "kv.slots"
        kept.parent.mkdir()
        kept.write_bytes(b"of the engine")
        await r.apply(spec(generation=2, kv_cache=KvCacheSpec(nvme_bytes=2 * GIB)))
        await r.serving(generation=2)
        assert kept.read_bytes() == b"of the engine"
        await r.apply(spec(generation=3))
        await r.serving(generation=3)
        assert not kept.parent.exists()


async def test_a_taken_port_is_given_up_for_another(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        r.files.switch(exit_at_start=1)
        os.kill(before.engine.pid, signal.SIGKILL)
        await r.replica(lambda s: s.restarts >= 2)
        with socket.create_server(("127.0.0.1", before.port)):
            r.files.switch()
            after = await r.serving()
        assert after.port != before.port


async def test_a_port_that_the_service_names_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with rig(tmp_path) as r:
            await r.apply(spec(port=port))
            waiting = await r.in_phase(ReplicaStatus.BACKING_OFF)
            assert waiting.message == f"could not start: port {port} is in use on 127.0.0.1"
            taken.close()
            assert (await r.serving()).port == port


@pytest.mark.slow
async def test_measured_latency_moves_the_bounds(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        r.files.switch(latency={"window_s": 0.2, "requests": 50, "tpot_at_percentile_s": 0.1})
        moved = await r.replica(lambda s: s.engine.objective_revision >= before.engine.objective_revision + 2)
        assert moved.engine.pid == before.engine.pid
        assert len(r.files.journal("objective")) >= 2


async def test_an_engine_that_refuses_to_be_steered_is_left_to_serve(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        missed = {"window_s": 0.1, "requests": 50, "tpot_at_percentile_s": 0.1}
        r.files.switch(refuses_objective=True, latency=missed)
        await r.until(lambda _: len(r.files.journal("refused")) == 1)
        # And by the next agent, whose first word is refused as well.
        await r.restart()
        await r.until(lambda _: len(r.files.journal("refused")) == 2)
        after = await r.serving()
        assert after.engine.pid == before.engine.pid
        assert r.files.journal("drain") == []
        # What the service itself asks for is worth it.
        await r.apply(spec(generation=2, tpot_s=0.02))
        assert (await r.serving(generation=2)).engine.pid != before.engine.pid


async def test_bounds_of_the_service_hold_against_feedback(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        fixed = spec().objective
        await r.apply(spec(objective=type(fixed)(fixed.slo, fixed.mode, ShareBounds(0.5, 0.5))))
        before = await r.serving()
        r.files.switch(latency={"window_s": 0.1, "requests": 50, "tpot_at_percentile_s": 0.1})
        seen = await r.replica(lambda s: s.engine.latency.requests == 50)
        assert seen.engine.objective_revision == before.engine.objective_revision
        assert r.files.journal("objective") == []


async def test_the_log_is_bounded_while_the_engine_writes(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        await r.serving()
        log = r.folder(spec()) / "engine.log"
        with log.open("a") as file:
            file.write("x" * (17 << 20))
        await r.until(lambda _: log.stat().st_size == 0)
        assert (log.parent / "engine.log.1").stat().st_size == 4 << 20


async def test_two_replicas_share_a_cpu_of_two_slots(tmp_path: Path) -> None:
    async with rig(tmp_path, cpu(slots=2)) as r:
        await r.apply(spec("one"))
        await r.apply(spec("two"))
        one, two = await r.serving(name="one"), await r.serving(name="two")
        assert one.port != two.port
        cores = {s["cores"] for s in r.files.journal("started")}
        assert cores == {"0,1", "2,3"}
        pools = {s["arguments"][s["arguments"].index("--kv-pool-memory") + 1] for s in r.files.journal("started")}
        assert pools == {str((4 * GIB - (512 << 20)) // 2)}


async def test_stopped_with_its_engines_an_agent_drains_them_and_remembers(tmp_path: Path) -> None:
    async with rig(tmp_path, stop_engines_after_s=10) as r:
        await r.apply(spec())
        before = await r.serving()
        await r.close()
        assert [e["code"] for e in r.files.journal("ended")] == [0]
        assert not psutil.pid_exists(before.engine.pid)
        await r.open()
        after = await r.serving()
        assert after.port == before.port
        assert len(r.files.journal("started")) == 2
