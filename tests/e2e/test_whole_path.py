"""From `kubectl apply` to tokens: a real API server, operator, agent and engine, with the built-in model."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from typing_extensions import override

from cluster.harness import Cluster
from engine.handover.processes import prefill_sides, runs

from .operator_rig import OperatorRig, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat.yaml"
# A cold start of the engine on a busy machine of two cores.
STARTED_S = 240.0


class WholePath(OperatorRig):
    """As OperatorRig, but the agent starts `tidelane serve`, on loopback."""

    @override
    def engine_arguments(self) -> tuple[str, ...]:
        return ("--address", "127.0.0.1", "--cpu-slots", "1")

    def engine(self) -> psutil.Process | None:
        """The core process of the engine that the agent of this rig runs."""
        state = str(self.folder)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "serve" in words and any(state in word for word in words):
                return process
        return None


@pytest.fixture
def path(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[WholePath]:
    with WholePath(installed, namespace, tmp_path) as made:
        made.start_agent()
        made.start_operator()
        made.kubectl("apply", "-f", str(EXAMPLE))
        made.kubectl("wait", "tlsvc/chat", "--for=condition=Ready", f"--timeout={STARTED_S:.0f}s")
        yield made


def ask(endpoint: str, padding: int = 0) -> str:
    with openai.OpenAI(base_url=endpoint, api_key="none", timeout=120, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "Well. " * padding + "What is the capital of France?"}],
            temperature=0,
            max_tokens=30,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def status(path: WholePath) -> dict[str, Any]:
    found: dict[str, Any] = (path.get() or {}).get("status", {})
    return found


def test_apply_ask_look_patch_delete(path: WholePath) -> None:
    endpoint = status(path)["endpoint"]
    # Side by side, so that one's prefill meets the others' decode.
    with ThreadPoolExecutor(max_workers=4) as clients:
        answers = list(clients.map(lambda padding: ask(endpoint, padding), [0, 0, 200, 400]))
    assert "Paris" in answers[0]
    assert "Paris" in answers[1]

    until(lambda: status(path).get("ttft") and status(path).get("lanes"), "figures in status", 60)
    header, row = path.kubectl("get", "tlsvc").splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REASON", "TTFT", "TPOT", "SLO", "LANES", "AGE"]
    print(f"{header}\n{row}")
    name, model, ready, reason, ttft, tpot, slo, lanes, _ = row.split()
    assert (name, model, ready, reason) == ("chat", "builtin://smollm2-135m-instruct", "True", "Serving")
    assert re.fullmatch(r"(\d+s)?(\d+ms)?", ttft)
    assert re.fullmatch(r"(\d+s)?(\d+ms)?", tpot)
    assert slo in ("Met", "Missed")
    assert lanes

    engine = path.engine()
    assert engine is not None
    path.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": {"tpot": "123ms"}}}))
    patched = path.until_serving(generation=2)
    assert patched["status"]["effectiveSLO"]["tpot"] == "123ms"
    until(lambda: _slo_seconds(endpoint, "tpot") == pytest.approx(0.123), "the engine's own targets")
    assert engine.is_running()
    assert "Paris" in ask(endpoint)

    family = [engine, *engine.children(recursive=True)]
    path.kubectl("delete", "tlsvc", "chat", "--timeout=90s")
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert path.get("service") is None
    with pytest.raises(openai.APIConnectionError):
        ask(endpoint)


def test_a_patch_to_two_processes_replaces_the_engine(path: WholePath) -> None:
    engine = path.engine()
    assert engine is not None
    answer = ask(status(path)["endpoint"])
    mode = {"spec": {"execution": {"mode": "Disaggregated"}}}
    path.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps(mode))
    until(lambda: path.condition("Ready")[0] == "True" and not engine.is_running(), "another engine", STARTED_S)
    path.until_serving(generation=2)
    replaced = path.engine()
    assert replaced is not None
    (side,) = prefill_sides(replaced.pid)
    assert ask(status(path)["endpoint"]) == answer
    path.kubectl("delete", "tlsvc", "chat", "--timeout=90s")
    until(lambda: not runs(side), "the prefill side is gone")


def test_an_engine_killed_in_mid_stream_leaves_ready_and_returns(path: WholePath) -> None:
    endpoint = status(path)["endpoint"]
    engine = path.engine()
    assert engine is not None
    with openai.OpenAI(base_url=endpoint, api_key="none", timeout=120, max_retries=0) as client:
        stream = client.completions.create(
            model="chat", prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        engine.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
    until(lambda: path.condition("Ready")[0] == "False", "Ready=False", 30)
    until(lambda: path.condition("Ready")[0] == "True", "Ready again", STARTED_S)
    assert status(path)["endpoint"] == endpoint
    assert "Paris" in ask(endpoint)


def _slo_seconds(endpoint: str, target: str) -> float | None:
    text = httpx.get(endpoint.removesuffix("/v1") + "/metrics").text
    found = re.search(rf'^tidelane_slo_target_seconds{{[^}}]*target="{target}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return float(found.group(1)) if found else None
