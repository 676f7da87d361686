"""From `helm install` to `helm uninstall` on a real node, as one story: each step begins where the one before ended."""

from __future__ import annotations

import pytest

from pods import node_configuration
from pods.release import AGENT, CHART, EXAMPLE, OPERATOR, PORT, SYSTEM, Answer, Release, answers, ends, until, values
from pods.story import Story

pytestmark = [pytest.mark.pods, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_the_chart_installs_and_its_pods_get_ready(release: Release, story: Story) -> None:
    with story.step("helm install --wait") as seen:
        release.helm("install", "tidelane", str(CHART), "--create-namespace", "--wait", "--timeout=280s", *values())
        for name, selector in (("operator", OPERATOR), ("agent", AGENT)):
            restarts = release.restarts(selector)
            seen.append(f"{name} Ready, {restarts} restarts")
            assert restarts == 0


def test_helm_test_passes(release: Release, story: Story) -> None:
    with story.step("helm test") as seen:
        assert "Phase:          Succeeded" in release.helm("test", "tidelane", "--timeout=120s")
        seen.append("Succeeded")


def test_the_example_gets_ready(release: Release, story: Story) -> None:
    with story.step("kubectl apply -f examples/chat.yaml, until Ready") as seen:
        release.node.kubectl("apply", "-f", str(EXAMPLE))
        release.wait_for_service("chat")
        seen.append(" ".join(release.node.kubectl("get", "inferenceservice", "chat", "--no-headers").split()))


def test_another_pod_chats_through_the_services_address(release: Release, story: Story) -> None:
    release.start_client()
    address = release.get("service", "chat")["spec"]["clusterIP"]
    for what, host in (("cluster IP", address), ("name", "chat.default.svc")):
        with story.step(f"a chat from another pod, by {what}") as seen:
            answer = release.chat(f"http://{host}:{PORT}")
            assert (answer.end, answer.tokens > 0) == ("done", True)
            seen.append(f"{answer.tokens} tokens in {answer.took_s} s")


def test_new_targets_reach_the_running_engine(release: Release, story: Story) -> None:
    engines = release.engines()
    assert len(engines) == 1
    with story.step("kubectl patch of the SLO, until in force") as seen:
        patch = '{"spec":{"slo":{"tpot":"190ms"}}}'
        release.node.kubectl("patch", "tlsvc", "chat", "--type=merge", f"--patch={patch}")
        until(lambda: release.targets_in_force("chat").get("tpot") == "190ms", "tpot is 190 ms")
        assert release.engines() == engines
        seen.append("the same engine")


def test_an_agents_pod_deleted_under_load(release: Release, story: Story) -> None:
    before = release.uid(AGENT)
    load = release.chats(release.url, streams=2, seconds=40, tokens=24)
    with story.step("agent's pod deleted under load, until Ready again") as seen:
        # The first answers have begun when there is something running in the engine.
        until(lambda: release.running(release.url) > 0, "requests run in the engine")
        release.node.kubectl("delete", "pod", "-n", SYSTEM, "-l", AGENT, "--wait=false")
        until(lambda: release.is_ready(AGENT, unlike=before), "another agent's pod is ready")
        release.wait_for_service("chat")
        assert release.chat_until_done(timeout_s=120).end == "done"
    seen_by_clients = answers(load, timeout_s=300)
    seen.append(ends(seen_by_clients))
    # A stream ends as a stream or with an error that says so; none just breaks off.
    assert broken(seen_by_clients) == []


def test_the_operators_pod_deleted(release: Release, story: Story) -> None:
    before, engines = release.uid(OPERATOR), release.engines()
    load = release.chats(release.url, streams=1, seconds=10, tokens=24)
    with story.step("operator's pod deleted under load, until Ready") as seen:
        release.node.kubectl("delete", "pod", "-n", SYSTEM, "-l", OPERATOR, "--wait=false")
        until(lambda: release.is_ready(OPERATOR, unlike=before), "another operator's pod is ready")
    seen_by_clients = answers(load, timeout_s=120)
    assert {answer.kind for answer in seen_by_clients} == {"done"}
    assert release.engines() == engines
    seen.append(f"{ends(seen_by_clients)}; the same engine")


def test_an_upgrade_leaves_engines_alone(release: Release, story: Story) -> None:
    engines, before = release.engines(), release.uid(OPERATOR)
    with story.step("helm upgrade of the operator's log level") as seen:
        release.helm("upgrade", "tidelane", str(CHART), "--reuse-values", "--set", "operator.logLevel=debug", "--wait")
        assert release.is_ready(OPERATOR, unlike=before)
        assert release.engines() == engines
        assert release.chat_until_done(timeout_s=60).end == "done"
        seen.append("the same engine")


def test_a_drained_node_keeps_its_agent(release: Release, story: Story) -> None:
    agent, engines = release.uid(AGENT), release.engines()
    operator = release.uid(OPERATOR)
    with story.step("kubectl drain --ignore-daemonsets, uncordon") as seen:
        name = node_configuration.NAME
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
        release.node.kubectl("drain", name, *flags, timeout_s=130)
        assert release.pod("run=client") is None
        release.node.kubectl("uncordon", name)
        until(lambda: release.is_ready(OPERATOR, unlike=operator), "an operator's pod is ready again")
        assert (release.uid(AGENT), release.engines()) == (agent, engines)
        seen.append("operator moved, the same agent and engine")


def test_uninstall_leaves_nothing_but_the_kinds(release: Release, story: Story) -> None:
    with story.step("kubectl delete tlsvc --all, helm uninstall") as seen:
        release.node.kubectl("delete", "tlsvc", "--all", "-A", "--timeout=120s", timeout_s=130)
        assert release.children("chat") == []
        release.helm("uninstall", "tidelane", "--wait", "--timeout=120s")
        until(lambda: release.left() == [], "nothing of the release is left", timeout_s=90)
        kinds = release.node.kubectl("get", "crd", "-o", "name").split()
        seen.append(f"{len(kinds)} kinds left")
        assert all(kind.endswith(".tidelane.dev") for kind in kinds)


def broken(seen: list[Answer]) -> list[Answer]:
    return [answer for answer in seen if answer.kind == "cut"]
