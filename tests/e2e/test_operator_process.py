"""The whole control plane as processes: kubectl, a real API server, the operator, agents; engines are fake."""

from __future__ import annotations

import copy
import json
import os
import signal
import urllib.error
import urllib.request
from typing import Any

import pytest

from cluster.harness import Cluster, KubectlError
from control_plane.wrong_manifests import RIGHT
from tidelane.operator.children import publishable

from .operator_rig import OperatorRig, free_port, stays, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def manifest(name: str = "chat", **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(RIGHT))
    made["metadata"]["name"] = name
    made["spec"] = {name: value for name, value in (made["spec"] | spec).items() if value is not None}
    return made


def slo(tpot: str) -> dict[str, Any]:
    return {"ttft": "200ms", "tpot": tpot}


@pytest.fixture
def serving(rig: OperatorRig) -> OperatorRig:
    rig.start_agent()
    rig.start_operator()
    rig.apply(manifest())
    rig.until_serving()
    return rig


def test_apply_wait_get_patch_delete(rig: OperatorRig) -> None:
    rig.start_agent()
    rig.start_operator(everywhere=True)
    rig.switch(
        latency={
            "requests": 40,
            "ttft_at_percentile_s": 0.123,
            "tpot_at_percentile_s": 0.045,
            "attainment": 1.0,
            "goodput_rps": 2.0,
        }
    )
    rig.apply(manifest())
    rig.kubectl("wait", "tlsvc/chat", "--for=condition=Ready", "--timeout=60s")
    service = rig.get()
    assert service
    assert service["metadata"]["finalizers"] == ["tidelane.dev/replicas"]
    assert service["status"]["endpoint"].startswith(f"http://{rig.address}:")

    until(lambda: (rig.get() or {})["status"].get("ttft") == "120ms", "figures in status")
    header, row = rig.kubectl("get", "tlsvc").splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REASON", "TTFT", "TPOT", "SLO", "LANES", "AGE"]
    assert row.split()[:7] == ["chat", RIGHT["spec"]["model"]["source"], "True", "Serving", "120ms", "45ms", "Met"]

    rig.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": slo("40ms")}}))
    patched = rig.until_serving(generation=2)
    assert patched["status"]["effectiveSLO"]["tpot"] == "40ms"
    assert len(rig.journal("started")) == 1
    assert rig.journal("objective")[-1]["tpot_s"] == pytest.approx(0.04)

    assert rig.get("service")
    if publishable(rig.address):
        endpoints = rig.get("endpointslice", "chat-0")
        assert endpoints
        assert endpoints["endpoints"][0]["addresses"] == [rig.address]
        assert patched["status"]["endpoint"].endswith(f":{endpoints['ports'][0]['port']}/v1")
    rig.kubectl("delete", "tlsvc", "chat", "--timeout=60s")
    assert rig.engines() == []
    assert rig.get("service") is None
    assert rig.get("endpointslice", "chat-0") is None


def test_metrics_of_the_operator(rig: OperatorRig) -> None:
    url = f"http://127.0.0.1:{free_port()}/metrics"
    rig.start_agent()
    rig.start_operator("--metrics", url)
    rig.apply(manifest())
    rig.until_serving()
    with urllib.request.urlopen(url, timeout=5) as answer:
        told = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    assert float(told["tidelane_operator_acts"]) == 1.0
    assert float(told['tidelane_operator_agents{state="connected"}']) == 1.0
    assert float(told['tidelane_operator_agents{state="lost"}']) == 0.0
    assert float(told["tidelane_operator_reconcile_seconds_count"]) >= 2.0


def test_events_tell_the_story(serving: OperatorRig) -> None:
    events = json.loads(serving.kubectl("get", "events", "-o", "json"))["items"]
    told = {each["reason"] for each in events if each["involvedObject"]["name"] == "chat"}
    assert {"Placed", "Ready"} <= told


def test_the_operator_writes_only_what_is_its_own(serving: OperatorRig) -> None:
    fields = json.loads(serving.kubectl("get", "tlsvc", "chat", "-o", "json", "--show-managed-fields"))
    managers = {
        (each["manager"], each.get("subresource", ""), tuple(sorted(each["fieldsV1"])))
        for each in fields["metadata"]["managedFields"]
        if "kubectl" not in each["manager"]
    }
    assert {(subresource, tops) for _, subresource, tops in managers} == {
        ("status", ("f:status",)),
        ("", ("f:metadata",)),
    }


def test_a_steady_service_writes_nothing(serving: OperatorRig) -> None:
    until(lambda: "goodput" in (serving.get() or {})["status"], "figures in status")

    def writes() -> int:
        return sum(write.namespace == serving.namespace for write in serving.cluster.writes())

    before = writes()
    # Longer than the interval of figures: what would be written in vain has its chance.
    assert stays(lambda: writes() == before, for_s=13)


@pytest.mark.parametrize("propagation", ["foreground", "background"])
def test_what_the_garbage_collector_deletes_is_not_made_again(
    controllers: Cluster, serving: OperatorRig, propagation: str
) -> None:
    before = len(serving.cluster.requests())
    serving.kubectl("delete", "tlsvc", "chat", f"--cascade={propagation}", "--timeout=60s")
    assert serving.engines() == []
    serving.until_gone("service")
    serving.until_gone("endpointslice", "chat-0")
    since = [each for each in serving.cluster.requests()[before:] if each.namespace == serving.namespace]
    deleted = next(at for at, each in enumerate(since) if (each.verb, each.resource) == ("delete", "inferenceservices"))
    children = {"services", "endpointslices"}
    assert [each for each in since[deleted:] if each.resource in children and each.verb in ("create", "patch")] == []


def test_an_engine_that_dies_comes_back_and_ready_tells(serving: OperatorRig) -> None:
    serving.switch(load_s=1.0)
    [pid] = serving.engines()
    os.kill(pid, signal.SIGKILL)
    until(lambda: serving.condition("Ready")[0] == "False", "not ready")
    serving.until_serving()
    assert [pid] != serving.engines()


def test_an_agent_that_restarts_keeps_its_engine_and_ready_does_not_blink(serving: OperatorRig) -> None:
    [since] = [each for each in (serving.get() or {})["status"]["conditions"] if each["type"] == "Ready"]
    engines = serving.engines()
    serving.end("node-a", signal.SIGKILL)
    serving.start_agent()
    serving.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": slo("30ms")}}))
    after = serving.until_serving(generation=2)
    assert serving.engines() == engines
    [ready] = [each for each in after["status"]["conditions"] if each["type"] == "Ready"]
    assert ready["lastTransitionTime"] == since["lastTransitionTime"]


def test_deleted_while_the_operator_was_stopped(serving: OperatorRig) -> None:
    assert serving.end("operator") == 0
    serving.kubectl("delete", "tlsvc", "chat", "--wait=false")
    assert serving.engines()
    assert serving.get()
    serving.start_operator()
    serving.until_gone()
    assert serving.engines() == []


def test_an_operator_that_restarts_moves_nothing(serving: OperatorRig) -> None:
    engines = serving.engines()
    serving.end("operator", signal.SIGKILL)
    serving.start_operator()
    serving.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": slo("30ms")}}))
    serving.until_serving(generation=2)
    assert serving.engines() == engines


def test_a_node_that_vanishes_is_replaced_and_must_let_go_when_it_returns(rig: OperatorRig) -> None:
    # Two agents on one machine find each other's ports in use only where the engines really listen.
    rig.address = "127.0.0.1"
    rig.start_agent("node-a")
    rig.start_agent("node-b")
    rig.start_operator("--unreachable-after", "1", "--move-after", "2")
    rig.apply(manifest())
    first = rig.until_serving()
    [placement] = first["status"]["placements"]
    lost = placement["node"]
    rig.processes[lost].send_signal(signal.SIGSTOP)

    def moved() -> bool:
        status = (rig.get() or {}).get("status", {})
        return bool(status["placements"][0]["node"] != lost and rig.condition("Ready")[0] == "True")

    until(moved, "placed on the other node")
    assert len(rig.engines()) == 2
    rig.processes[lost].send_signal(signal.SIGCONT)
    until(lambda: len(rig.engines()) == 1, "the node that returned let go")
    assert rig.condition("Ready") == ("True", "Serving")


def test_the_api_server_restarts(serving: OperatorRig) -> None:
    serving.cluster.restart_api_server()
    serving.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": slo("30ms")}}))
    serving.until_serving(generation=2)
    serving.kubectl("delete", "service", "chat")
    until(lambda: serving.get("service"), "the Service is made again")
    assert len(serving.journal("started")) == 1


def test_no_room_is_told_with_the_field(rig: OperatorRig) -> None:
    rig.start_agent()
    rig.start_operator()
    rig.apply(manifest(resources={"gpus": 8}))
    rig.until_condition("Scheduled", "False", "NoRoom")
    conditions = (rig.get() or {})["status"]["conditions"]
    [scheduled] = [each for each in conditions if each["type"] == "Scheduled"]
    assert "spec.resources.gpus: 8 wanted; no node has more than 1" in scheduled["message"]
    rig.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", '{"spec": {"resources": {"gpus": 1}}}')
    rig.until_serving(generation=2)


def test_a_second_service_waits_for_room_and_gets_it(serving: OperatorRig) -> None:
    serving.apply(manifest("second"))
    serving.until_condition("Scheduled", "False", "NoRoom", service="second")
    serving.kubectl("delete", "tlsvc", "chat", "--timeout=60s")
    serving.until_serving(service="second")


def test_replicas_follow_the_load_and_the_spec_stays(rig: OperatorRig) -> None:
    late = {
        "window_s": 60.0,
        "requests": 50,
        "attainment": 0.5,
        "goodput_rps": 1.0,
        "ttft_at_percentile_s": 0.4,
        "queue_at_percentile_s": 0.3,
        "prefill_at_percentile_s": 0.1,
        "queue_p90_s": 0.2,
        "prefill_p50_s": 0.02,
        "tpot_at_percentile_s": 0.02,
        "tpot_p50_s": 0.02,
    }
    in_time = {**late, "attainment": 1.0, "ttft_at_percentile_s": 0.1, "queue_p90_s": 0.0}
    rig.switch(latency=in_time)
    rig.start_agent("node-a", "--cpu-slots", "4")
    rig.start_operator("--scale-down-after", "3600")
    rig.apply(manifest(replicas=None, scaling={"min": 1, "max": 3}))
    rig.until_serving()

    def number() -> int:
        replicas: int = (rig.get() or {})["status"]["scaling"]["replicas"]
        return replicas

    assert number() == 1
    rig.switch(latency=late)
    until(lambda: number() == 3 and len(rig.engines()) == 3, "as many as may be")
    figures = (rig.get() or {})["status"]
    assert (figures["ttftQueue"], figures["ttftPrefill"]) == ("300ms", "100ms")
    rig.end("operator", signal.SIGKILL)
    rig.switch(latency=in_time)
    engines = rig.engines()
    rig.start_operator("--scale-down-after", "2")
    until(lambda: number() == 1 and len(rig.engines()) == 1, "as few as may be")
    assert rig.engines() == engines[:1]
    assert rig.journal("drain")
    found = rig.get()
    assert found
    assert (found["metadata"]["generation"], found["spec"]["scaling"]) == (1, {"min": 1, "max": 3})
    assert "replicas" not in found["spec"]
    events = json.loads(rig.kubectl("get", "events", "-o", "json"))["items"]
    told = [each["message"] for each in events if each["reason"] in ("ScaledUp", "ScaledDown")]
    assert sorted(message.partition(":")[0] for message in told) == [
        "1 to 2 replicas",
        "2 to 1 replicas",
        "2 to 3 replicas",
        "3 to 2 replicas",
    ]
    # Whoever sets a number by hand is told that load sets it.
    with pytest.raises(KubectlError, match="set one of replicas"):
        rig.kubectl("scale", "tlsvc/chat", "--replicas=2")


def test_a_new_model_comes_up_before_the_old_goes_and_one_that_fails_stops_there(rig: OperatorRig) -> None:
    rig.start_agent("node-a", "--cpu-slots", "3")
    rig.start_operator()
    rig.apply(manifest(replicas=2))
    rig.until_serving()
    old = rig.engines()
    fewest = len(old)

    def rolled_out() -> bool:
        nonlocal fewest
        fewest = min(fewest, len(rig.engines()))
        status = (rig.get() or {})["status"]
        return (status["observedGeneration"], status["readyReplicas"], "surge" in status) == (2, 2, False)

    model = RIGHT["spec"]["model"]
    rig.apply(manifest(replicas=2, model={**model, "maxContextTokens": 2048}))
    until(rolled_out, "both are replaced and the one more has gone")
    until(lambda: len(rig.engines()) == 2, "as many as before")
    assert fewest == 2
    assert len(rig.journal("started")) == 2 + 1 + 2
    assert not set(old) & set(rig.engines())
    rig.until_condition("Ready", "True", "Serving")

    now = rig.engines()
    rig.switch(exit_at_start=78)
    rig.apply(manifest(replicas=2, model={**model, "maxContextTokens": 1024}))
    rig.until_condition("Stalled", "True", "EngineFailed")
    conditions = (rig.get() or {})["status"]["conditions"]
    [told] = [each["message"] for each in conditions if each["type"] == "Stalled"]
    assert told.startswith("the others are not replaced: replica 2 on node-a: ")
    assert rig.engines() == now
    rig.switch()
    rig.apply(manifest(replicas=2, model={**model, "maxContextTokens": 2048}))
    rig.until_serving(generation=4)
    until(lambda: "surge" not in (rig.get() or {})["status"], "the one that failed goes")
    assert rig.engines() == now


def test_an_agent_gone_for_good_holds_a_deletion_until_it_is_forced(serving: OperatorRig) -> None:
    serving.end("node-a", signal.SIGKILL)
    serving.kubectl("delete", "tlsvc", "chat", "--wait=false")
    serving.until_condition("Ready", "False", "Deleting")
    serving.kubectl("annotate", "tlsvc", "chat", "tidelane.dev/force-delete=true")
    serving.until_gone()
    # The agent comes back after all, with an engine that nobody owns any more.
    serving.start_agent()
    until(lambda: serving.engines() == [], "the engine is stopped")


def test_of_two_operators_one_acts_and_the_other_takes_over(rig: OperatorRig) -> None:
    lease = ("--lease", f"{rig.namespace}/operator")
    url = f"http://127.0.0.1:{free_port()}/healthz"
    rig.start_agent()
    rig.start_operator(*lease, name="first")

    def holder() -> str:
        found = rig.get("lease", "operator") or {"spec": {}}
        return str(found["spec"].get("holderIdentity", ""))

    first = until(holder, "someone acts")
    rig.start_operator(*lease, "--liveness", url, name="second")
    until(lambda: probed(url) == {"control": "standing by"}, "the one that stands by answers its probe")
    rig.apply(manifest())
    placed = rig.until_serving()["status"]["placements"]
    (engine,) = rig.engines()

    rig.processes["first"].send_signal(signal.SIGSTOP)
    until(lambda: holder() not in ("", first), "the second takes over")
    rig.apply(manifest(slo=slo("900ms")))
    written = rig.until_serving(2)["metadata"]["resourceVersion"]
    before = writes_but_leases(rig)
    rig.processes["first"].send_signal(signal.SIGCONT)
    assert rig.processes.pop("first").wait(timeout=30) == 1
    after = rig.until_serving(2)
    # By the API server's books, neither it nor the one that acts, which had nothing to do.
    assert writes_but_leases(rig) == before
    assert (after["status"]["placements"], rig.engines()) == (placed, [engine])
    assert after["metadata"]["resourceVersion"] == written

    # One that ends in peace leaves the Lease to the next at once; one that is killed does not.
    rig.start_operator(*lease, name="third")
    second = holder()
    rig.end("second", signal.SIGKILL)
    until(lambda: holder() not in ("", second), "the third takes over")
    rig.apply(manifest(slo=slo("800ms")))
    assert rig.until_serving(3)["status"]["placements"] == placed
    assert rig.engines() == [engine]
    assert rig.end("third") == 0
    assert holder() == ""


def test_liveness(rig: OperatorRig) -> None:
    rig.start_agent()
    url = f"http://127.0.0.1:{free_port()}/healthz"
    rig.start_operator("--liveness", url)

    until(lambda: probed(url) == {"control": "alive"}, "the probe answers")


def test_who_may_not_have_its_lease_says_so_to_its_probe(rig: OperatorRig) -> None:
    url = f"http://127.0.0.1:{free_port()}/healthz"
    rig.start_agent()
    rig.start_operator("--lease", "nowhere/operator", "--liveness", url)
    until(lambda: refused(url) and "no such namespace" in refused(url), "the probe fails with the reason")
    # Once it may, it acts, and was not to be started again for that.
    rig.cluster.kubectl("create", "namespace", "nowhere")
    until(lambda: probed(url) == {"control": "alive"}, "it acts")
    assert rig.processes["operator"].poll() is None
    log = (rig.folder / "operator.log").read_text()
    assert log.count("the Lease cannot be read or renewed") == 1


def writes_but_leases(rig: OperatorRig) -> int:
    return sum(each.namespace == rig.namespace and each.resource != "leases" for each in rig.cluster.writes())


def refused(url: str) -> str:
    """Why a probe fails; empty if it does not."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def probed(url: str) -> Any:
    """What a liveness probe is answered; None while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None
