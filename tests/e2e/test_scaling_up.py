"""`tidelane up` with real engines and the built-in model, under the load of `tidelane bench`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from .operator_rig import until
from .test_operator_up import UpRig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_TIDELANE = (sys.executable, "-m", "tidelane.cli.main")
# Two cold starts and a window of slow answers, on a busy machine of two cores.
_LIMIT_S = 400.0


class RealUp(UpRig):
    """As UpRig, but its engines are real."""

    @override
    def start(self, *arguments: str) -> None:
        state = ("--state-dir", str(self.folder / "state"), "--status-file", str(self.folder / "status.json"))
        with self.output_file.open("wb") as output:
            command = [*_TIDELANE, "up", "-f", str(self.manifests), *state, *arguments]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[RealUp]:
    rig = RealUp(tmp_path)
    yield rig
    rig.close()


def manifest() -> dict[str, Any]:
    return {
        "apiVersion": "tidelane.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": "builtin://smollm2-135m-instruct", "maxContextTokens": 1024},
            # Generous to one request alone on one core; nobody keeps it in a queue that only grows.
            "slo": {"ttft": "5s", "tpot": "2s", "percentile": 90},
            "scaling": {"min": 1, "max": 2},
        },
    }


def test_prompts_that_wait_bring_a_second_engine(up: RealUp) -> None:
    up.write("chat", manifest())
    up.start("--drain", "1")
    until(lambda: up.service().get("ready"), "the first engine serves", _LIMIT_S)
    status = up.service()["status"]
    assert (status["scaling"]["replicas"], status["readyReplicas"]) == (1, 1)
    url = status["endpoint"].removesuffix("/v1")
    traffic = ("--mix", "chat:rate=4,in=200-300,out=2-4", "--duration", str(_LIMIT_S))
    with (up.folder / "bench").open("wb") as output:
        load = subprocess.Popen(
            [*_TIDELANE, "bench", "--url", url, "--model", "chat", *traffic], stdout=output, stderr=output
        )
    try:
        until(lambda: up.service()["status"]["readyReplicas"] == 2, "a second engine serves", _LIMIT_S)
    finally:
        load.kill()
        load.wait()
    status = up.service()["status"]
    assert status["scaling"]["replicas"] == 2
    assert up.service()["ready"]
    assert "ttftQueue" in status
    up.says("chat: ScaledUp: 1 to 2 replicas: ")
    up.signal(signal.SIGINT)
    assert up.process
    assert up.process.wait(timeout=_LIMIT_S) == 0
    assert up.agents() == []
