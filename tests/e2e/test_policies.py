"""Policies through a real API server, an operator, an agent and a running engine, and through `tidelane up`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.harness import KubectlError
from control_plane.wrong_manifests import POLICY, edited

from .operator_rig import OperatorRig, stays, until
from .test_operator_up import UpRig

MEASURED = {
    "window_s": 60.0,
    "requests": 40,
    "ttft_at_percentile_s": 0.123,
    "tpot_at_percentile_s": 0.045,
    "attainment": 1.0,
    "goodput_rps": 2.0,
}


def policy(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """For the services of one namespace: the API server is shared by many tests."""
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    wanted = {"selector": selector, "mode": "DryRun", "overrides": {"slo": {"tpot": "40ms"}}, **spec}
    return {**POLICY, "metadata": {"name": name}, "spec": wanted}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpRig]:
    rig = UpRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def name(rig: OperatorRig) -> Iterator[str]:
    """Of a policy, which is gone afterwards."""
    made = f"gold-{rig.namespace}"
    yield made
    with contextlib.suppress(KubectlError):
        rig.cluster.kubectl("delete", "slop", made)


def found(rig: OperatorRig, name: str) -> dict[str, Any]:
    policy: dict[str, Any] = json.loads(rig.cluster.kubectl("get", "slop", name, "-o", "json"))
    return policy


def verdicts(rig: OperatorRig, name: str) -> dict[str, str]:
    services = found(rig, name).get("status", {}).get("services", ())
    return {each["name"]: each["verdict"] for each in services}


@pytest.mark.cluster
@pytest.mark.slow
def test_tried_then_enforced_then_deleted(rig: OperatorRig, name: str) -> None:
    rig.start_agent()
    rig.start_operator(everywhere=True)
    rig.switch(latency=MEASURED)
    rig.apply(edited("spec.replicas", 1))
    rig.until_serving()
    until(lambda: "ttft" in (rig.get() or {})["status"], "figures in status")
    service = rig.get()
    assert service

    rig.apply(policy(name, rig.namespace))
    until(lambda: verdicts(rig, name) == {"chat": "WouldBreach"}, "the dry run says what would be")
    [told] = found(rig, name)["status"]["services"]
    assert told["changes"] == [{"field": "tpot", "from": "50ms", "to": "40ms"}]
    rig.cluster.kubectl("wait", f"slop/{name}", "--for=condition=Attainable=False", "--timeout=10s")
    assert rig.journal("objective") == []

    rig.apply(policy(name, rig.namespace, mode="Enforce", overrides={"slo": {"tpot": "48ms"}}))
    held = until(lambda: _tpot(rig) == "48ms" and rig.get(), "the service is held to it")
    assert {each["field"]: each["source"] for each in held["status"]["effectiveSLO"]["sources"]}["tpot"] == (
        f"SLOPolicy {name} (overrides)"
    )
    assert rig.journal("objective")[-1]["tpot_s"] == pytest.approx(0.048)
    # The operator's own server-side apply, GitOps and generations never see it.
    assert (held["spec"], held["metadata"]["generation"]) == (service["spec"], 1)
    assert rig.condition("Ready") == ("True", "Serving")
    # Once the figures count as measured under these very targets, all of the requests met them.
    until(lambda: _at_least(rig, name) == 100, "the policy's status follows")
    assert verdicts(rig, name) == {"chat": "WouldMeet"}

    def writes() -> int:
        return sum(
            write.namespace == rig.namespace or write.resource == "slopolicies" for write in rig.cluster.writes()
        )

    until(lambda: "goodput" in (rig.get() or {})["status"], "figures in status")
    before = writes()
    # Longer than the interval of figures, and than what policies say of services takes to follow.
    assert stays(lambda: writes() == before, for_s=12)

    rig.cluster.kubectl("delete", "slop", name)
    until(lambda: _tpot(rig) == "50ms", "the service has its own again")
    assert rig.journal("objective")[-1]["tpot_s"] == pytest.approx(0.05)
    assert len(rig.journal("started")) == 1
    assert rig.condition("Ready") == ("True", "Serving")


def _at_least(rig: OperatorRig, name: str) -> int:
    [service] = found(rig, name)["status"]["services"]
    at_least: int = service["attainmentAtLeast"]
    return at_least


def _tpot(rig: OperatorRig) -> str:
    tpot: str = (rig.get() or {})["status"]["effectiveSLO"]["tpot"]
    return tpot


@pytest.mark.slow
def test_up_takes_policies_beside_services(up: UpRig) -> None:
    up.write("chat", edited("spec.slo.tpot", None))
    up.write("gold", policy("gold", "default", defaults={"slo": {"tpot": "30ms"}}, overrides={"slo": {"ttft": "1s"}}))
    up.start()
    up.until_serving()
    up.says("policy gold: matches 1, would change 1; TooLittleMeasured: 1 of 1: default/chat")
    assert up.service()["status"]["effectiveSLO"]["source"] == "spec, built in"
    up.write("gold", policy("gold", "default", mode="Enforce", overrides={"slo": {"tpot": "30ms"}}))
    until(lambda: up.service()["status"]["effectiveSLO"]["tpot"] == "30ms", "the service is held to it")
    (up.manifests / "gold.yaml").unlink()
    until(lambda: up.service()["status"]["effectiveSLO"]["tpot"] == "100ms", "what is built in holds again")
    up.says("policy gold: gone")
    up.says("chat: TargetsChanged: tpot 100ms to 30ms (SLOPolicy gold (overrides))")
    assert [round(each["tpot_s"], 3) for each in up.journal("objective")] == [0.03, 0.1]
    assert len(up.journal("started")) == 1
    up.write("gold", policy("gold", "default", mode="Enforced"))
    up.says("gold.yaml, document 1: spec.mode: Unsupported value")
