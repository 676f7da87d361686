"""`tidelane up` as a process, with a real agent and fake engines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fake_engine import Switches
from agent.rig import end_engines
from control_plane.wrong_manifests import WRONG, edited

from .operator_rig import lives, until

pytestmark = pytest.mark.slow

_FAKE = Path(__file__).parents[1] / "agent" / "fake_engine.py"
_UP = (sys.executable, "-m", "tidelane.cli.main", "up")


class UpRig:
    """Manifests are in `manifests`, everything else in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifests = folder / "manifests"
        self.manifests.mkdir()
        self.output_file = folder / "output"
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "journal").touch()

    def write(self, name: str, manifest: dict[str, Any]) -> None:
        (self.manifests / f"{name}.yaml").write_text(json.dumps(manifest))

    def switch(self, **values: Any) -> None:
        Switches(**values).write(self.folder / "switches")

    def start(self, *arguments: str) -> None:
        engine = (sys.executable, str(_FAKE), "--switches", str(self.folder / "switches"))
        command = shlex.join([*engine, "--journal", str(self.folder / "journal")])
        state = ("--state-dir", str(self.folder / "state"), "--status-file", str(self.folder / "status.json"))
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [*_UP, "-f", str(self.manifests), "--engine-command", command, *state, *arguments],
                stdout=output,
                stderr=output,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def exit_code(self) -> int:
        assert self.process
        return self.process.wait(timeout=30)

    def output(self) -> str:
        return self.output_file.read_text()

    def says(self, text: str) -> None:
        until(lambda: text in self.output(), f"{text!r} in what it prints")

    def service(self, name: str = "chat") -> dict[str, Any]:
        path = self.folder / "status.json"
        services = json.loads(path.read_text())["services"] if path.exists() else []
        return next((each for each in services if each["name"] == name), {})

    def policy(self, name: str) -> dict[str, Any]:
        path = self.folder / "status.json"
        found = json.loads(path.read_text())["policies"] if path.exists() else []
        status: dict[str, Any] = next((each["status"] for each in found if each["name"] == name), {})
        return status

    def until_serving(self, name: str = "chat", generation: int = 1) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = self.service(name)
            current = found.get("status", {}).get("observedGeneration") == generation
            return found if current and found["ready"] else None

        found: dict[str, Any] = until(look, f"{name} serves generation {generation}")
        return found

    def journal(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "journal").read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def engines(self) -> list[int]:
        return [each["pid"] for each in self.journal("started") if lives(each["pid"])]

    def agents(self) -> list[int]:
        return self._with_state_folder(b"agent")

    def guards(self) -> list[int]:
        return self._with_state_folder(b"tidelane.agent.guard")

    def _with_state_folder(self, word: bytes) -> list[int]:
        """Processes with this run's state folder and `word` on their command line."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word in words and str(self.folder / "state").encode() in words and lives(int(folder.name)):
                found.append(int(folder.name))
        return found

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            for pid in self.agents():
                os.kill(pid, signal.SIGKILL)
        end_engines(self.folder / "state")
        print(self.output())


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpRig]:
    rig = UpRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def serving(up: UpRig) -> UpRig:
    up.write("chat", edited("spec.replicas", 1))
    up.start()
    up.until_serving()
    return up


def test_up_and_down(serving: UpRig) -> None:
    endpoint = serving.service()["endpoint"]
    serving.says(f"chat: ready at {endpoint}")
    serving.says(f"curl -s {endpoint}/chat/completions")
    [pid], [agent] = serving.engines(), serving.agents()
    serving.signal(signal.SIGINT)
    assert serving.exit_code() == 0
    assert "chat: gone" in serving.output()
    assert not lives(pid)
    assert not lives(agent)
    assert serving.journal("drain")


def test_a_new_slo_reaches_the_running_engine(serving: UpRig) -> None:
    serving.write("chat", edited("spec.slo.tpot", "40ms"))
    after = serving.until_serving(generation=2)
    assert after["status"]["effectiveSLO"]["tpot"] == "40ms"
    assert len(serving.journal("started")) == 1
    assert serving.journal("objective")[-1]["tpot_s"] == pytest.approx(0.04)


def test_a_wrong_edit_is_refused_while_the_old_one_serves_on(serving: UpRig) -> None:
    serving.write("chat", edited("spec.slo.tpot", "0s"))
    serving.says("chat.yaml, document 1: spec.slo.tpot: Invalid value")
    assert serving.service()["ready"]
    serving.write("chat", edited("spec.slo.tpot", "30ms"))
    serving.until_serving(generation=2)
    assert len(serving.engines()) == 1


def test_files_come_and_go(up: UpRig) -> None:
    up.write("a", edited("metadata.name", "a"))
    up.write("b", edited("metadata.name", "b"))
    up.start()
    up.until_serving("a")
    up.until_serving("b")
    (up.manifests / "a.yaml").unlink()
    up.says("a: gone")
    assert up.service("b")["ready"]
    assert len(up.engines()) == 1
    up.write("c", edited("metadata.name", "c"))
    up.until_serving("c")


def test_no_room_is_told_with_the_field(up: UpRig) -> None:
    up.write("chat", edited("spec.resources", {"gpus": 8}))
    up.start()
    up.says("spec.resources.gpus: 8 wanted; no node has more than 1")
    up.write("chat", edited("spec.resources", {"gpus": 1}))
    up.until_serving(generation=2)


def test_what_the_engine_cannot_run_is_told(up: UpRig) -> None:
    up.switch(exit_at_start=78)
    up.write("chat", edited("spec.replicas", 1))
    up.start()
    up.says("chat: EngineFailed")
    assert up.service()["stalled"]


def test_an_agent_that_dies_is_started_again_and_finds_its_engine(serving: UpRig) -> None:
    engines = serving.engines()
    [agent] = serving.agents()
    os.kill(agent, signal.SIGKILL)
    until(lambda: serving.agents() not in ([], [agent]), "another agent")
    serving.write("chat", edited("spec.slo.tpot", "40ms"))
    serving.until_serving(generation=2)
    assert serving.engines() == engines


def test_a_second_interrupt_waits_for_nobody(serving: UpRig) -> None:
    serving.switch(drain_takes_s=600)
    serving.signal(signal.SIGINT)
    serving.says("Ctrl-C again to stop at once")
    serving.says("Deleting")
    assert serving.engines()
    serving.signal(signal.SIGINT)
    assert serving.exit_code() == 0
    assert serving.engines() == []
    assert serving.agents() == []


def test_nothing_outlives_it_even_if_it_is_killed(serving: UpRig) -> None:
    serving.signal(signal.SIGKILL)
    serving.exit_code()
    until(lambda: not serving.agents() and not serving.engines(), "agent and engine are gone")


def test_engines_end_even_if_agent_and_up_are_killed(serving: UpRig) -> None:
    [agent] = serving.agents()
    words = Path(f"/proc/{agent}/cmdline").read_text().split("\0")
    scratch = Path(words[words.index("--listen") + 1].removeprefix("unix:")).parent
    assert scratch.is_dir()
    # Stopped first: the agent must not be started again, nor told that its parent is gone.
    serving.signal(signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    serving.signal(signal.SIGKILL)
    serving.exit_code()
    until(lambda: not serving.engines(), "the engine is gone")
    until(lambda: not serving.guards(), "the guard is gone")
    assert not scratch.exists()


def test_the_next_one_takes_over_what_was_left(serving: UpRig) -> None:
    """When the guard was killed as well."""
    [left] = serving.engines()
    serving.signal(signal.SIGSTOP)
    for pid in (*serving.guards(), *serving.agents()):
        os.kill(pid, signal.SIGKILL)
    serving.signal(signal.SIGKILL)
    serving.exit_code()
    assert serving.engines() == [left]
    serving.start()
    until(lambda: len(serving.journal("started")) == 2 and serving.service().get("ready"), "another engine serves")
    until(lambda: left not in serving.engines(), "the engine that was left is gone")
    assert len(serving.engines()) == 1


def test_one_state_folder_serves_one_run(serving: UpRig) -> None:
    assert serving.process
    state = serving.folder / "state"
    command = [*_UP, "-f", str(serving.manifests), "--state-dir", str(state)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 2
    holder = f"process {serving.process.pid} is using it; end that first, or give another --state-dir"
    assert second.stderr == f"tidelane up: --state-dir {state}: {holder}\n"
    assert serving.service()["ready"]


def test_an_agent_that_cannot_start_ends_it_with_the_reason(up: UpRig) -> None:
    up.write("chat", edited("spec.replicas", 1))
    (up.folder / "state").mkdir()
    (up.folder / "state" / "engines").touch()
    up.start()
    assert up.exit_code() == 1
    why = "File exists; it must be a folder to write to, with room left"
    assert up.output() == f"tidelane up: state folder {up.folder}/state: {why}\n"


@pytest.mark.parametrize("wrong", WRONG[::7], ids=str)
def test_a_wrong_manifest_is_refused(up: UpRig, wrong: Any) -> None:
    up.write("chat", wrong.manifest)
    up.start()
    assert up.exit_code() == 2
    assert f"chat.yaml, document 1: {wrong.refused_field}: " in up.output()
    assert wrong.rule in up.output()


def test_no_manifest(up: UpRig) -> None:
    up.start()
    assert up.exit_code() == 2
    assert "no manifest in it" in up.output()


def test_a_dry_run_is_simulated_with_what_engines_report(up: UpRig) -> None:
    """Each token takes 11 ms here: by the engine's word, over the agent, to a simulation beside the operator."""
    passes = [
        {"phase": phase, "units": 1, "knots": [1, 1001], "linearS": [first_s, first_s + 1.0]}
        for phase, first_s in (("decode", 0.01), ("prefill", 0.001))
    ]
    lengths = {"counts": [0] * 12 + [120], "tokens": 16 * 120}
    up.switch(
        latency={"windowS": 60, "requests": 60, "ttftAtPercentileS": 0.02, "tpotAtPercentileS": 0.01, "attainment": 1},
        workload={
            "observedS": 120, "requests": 120, "gaps": 119, "gapsS": 119, "gapsSquaredS2": 150,
            "promptTokens": lengths, "outputTokens": lengths,
            "machine": {
                "device": "cpu: fake", "units": 1, "dtype": "float32", "layers": 4, "blockTokens": 16,
                "kvTokens": 16000, "times": passes, "decodeSlowdown": 1, "prefillSlowdown": 1, "guard": 1,
            },
        },
    )  # fmt: skip
    up.write("chat", edited("spec.replicas", 1))
    policy = {"apiVersion": "tidelane.dev/v1alpha1", "kind": "SLOPolicy", "metadata": {"name": "gold"}}
    up.write("gold", {**policy, "spec": {"selector": {}, "overrides": {"slo": {"tpot": "5ms", "percentile": 90}}}})
    up.start()
    up.until_serving()

    def simulated() -> dict[str, Any] | None:
        [entry] = up.policy("gold").get("services") or [{}]
        return entry if entry.get("basis") == "Simulated" else None

    found: dict[str, Any] = until(simulated, "a forecast", limit_s=90)
    assert (found["verdict"], found["simulated"]["attainment"]) == ("WouldBreach", 0)
    assert "replicas" not in found["simulated"]  # a token takes longer than 5 ms, however many there are
    assert found["simulated"]["tpot"] in {"10ms", "11ms"}
