"""The state folder: what is written is read back, never half, by one agent at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.rig import spec
from tidelane.agent.claims import Claim, Slot
from tidelane.agent.engine_process import ProcessIdentity
from tidelane.agent.errors import CannotStart, TryLater
from tidelane.agent.ports import choose_port, is_free
from tidelane.agent.state import Damaged, Launched, Record, ReplicaFolder, StateFolder
from tidelane.rpc.wire import KvCacheSpec, ShareBounds

CLAIM = Claim((Slot("GPU-0"), Slot("cpu", 3)), 12345)
FULL = spec(
    generation=2**60,
    devices=2,
    port=8080,
    kv_cache=KvCacheSpec("int8", 2**40, 2**41, 12.5, True),
    objective=type(spec().objective)(spec().objective.slo, spec().objective.mode, ShareBounds(0.25, 0.5), 7),
)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    assert state.load(0.0) == []
    records = [Record(spec(), CLAIM), Record(FULL, CLAIM, remove_by_unix_s=1e9 + 0.25)]
    state.save(records)
    state.close()
    again = StateFolder(tmp_path)
    assert again.load(0.0) == records
    again.close()


def test_a_failed_save_leaves_the_last_one_whole(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.save([Record(spec(), CLAIM)])
    (tmp_path / "state.json.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        state.save([])
    assert state.load(0.0) == [Record(spec(), CLAIM)]
    state.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"version": 1}',
        '{"version": 1, "replicas": [{}]}',
        '{"version": 1, "replicas": 5}',
        "\0",
    ],
)
def test_damage_of_any_kind_is_moved_aside(tmp_path: Path, text: str) -> None:
    state = StateFolder(tmp_path)
    (tmp_path / "state.json").write_text(text)
    assert state.load(1234.5) == []
    assert (tmp_path / "state.json.damaged-1234").read_text() == text
    assert json.loads((tmp_path / "state.json").read_text()) == {"version": 1, "replicas": []}
    state.close()


def test_what_was_launched_comes_back_and_stands_in_for_lost_records(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    folder = state.folder(spec().ref)
    folder.prepare()
    launched = Launched(FULL, CLAIM, 20001, ProcessIdentity(12, 34, "boot"), ready_since_unix_s=1.5)
    folder.write_launched(launched)
    assert folder.read_launched() == launched
    assert state.load(0.0) == [Record(FULL, CLAIM)]
    state.close()


def test_a_damaged_launch_file_is_told_apart_from_none(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path)
    assert folder.read_launched() is None
    (tmp_path / "launch.json").write_text('{"version": 1, "spec": {}}')
    with pytest.raises(Damaged):
        folder.read_launched()


def test_two_agents_never_share_it_and_an_engine_does_not_inherit_the_lock(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    with pytest.raises(CannotStart, match=f"process {os.getpid()} is using it; end that first"):
        StateFolder(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state.close()
        StateFolder(tmp_path).close()
        child.kill()


def test_only_its_owner_may_look_in(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    state = StateFolder(tmp_path / "state")
    folder = state.folder(spec().ref)
    folder.prepare()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert folder.path.stat().st_mode & 0o777 == 0o700
    state.close()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="at most 78 bytes"):
        StateFolder(tmp_path / ("x" * 100))
    longest = tmp_path / ("x" * (78 - len(os.fsencode(tmp_path)) - 1))
    state = StateFolder(longest)
    assert len(os.fsencode(state.folder(spec().ref).control_socket)) == 107
    state.close()


def test_replicas_have_folders_of_their_own(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    ref = spec().ref
    others = [ref, *(type(ref)(*parts) for parts in (("a", "b", "u", 0), ("ab", "c", "u", 0), ("a", "bc", "u", 0)))]
    assert len({state.folder(ref).path for ref in others}) == 4
    state.close()


def test_last_words_are_the_logs_last_line(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path)
    assert folder.last_words() == ""
    folder.log_file.write_bytes(b"first\n" + b"x" * 9000 + b"\nlast \xff one\n\n")
    assert folder.last_words() == "last \N{REPLACEMENT CHARACTER} one"


def test_ports_stay_move_and_run_out() -> None:
    import socket

    ref = spec().ref
    first = choose_port(ref, "127.0.0.1", None, None, ())
    assert choose_port(ref, "127.0.0.1", None, None, ()) == first
    assert choose_port(ref, "127.0.0.1", None, first + 1, ()) == first + 1
    assert choose_port(ref, "127.0.0.1", None, first, {first}) != first
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(TryLater, match=f"port {port} is in use"):
            choose_port(ref, "127.0.0.1", port, None, ())
        with pytest.raises(TryLater, match="no free port from"):
            choose_port(ref, "127.0.0.1", None, None, (), range(port, port + 1))
    assert choose_port(ref, "127.0.0.1", port, None, ()) == port
