"""The operator as the chart's ServiceAccount, with the chart's keys: it may do all that it does, and nothing more."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.harness import Binaries, KubectlError
from tidelane.operator.children import publishable

from .chart_rig import CHART, AuditedCluster, Helm
from .operator_rig import OperatorRig, free_port, until
from .test_operator_process import manifest, probed, slo

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

_HOME = "tidelane-system"
_POLICY = Path(__file__).parents[2] / "examples" / "slo-policy" / "policy.yaml"
# No request of their own: the API server asks for these in the course of another.
_ASKED_BY_THE_SERVER = {
    # Of a server-side apply, where it creates; shown needed below.
    ("", "services", "create"),
    ("discovery.k8s.io", "endpointslices", "create"),
    # Of whoever names an owner, where OwnerReferencesPermissionEnforcement is on; not in our tests.
    ("tidelane.dev", "inferenceservices/finalizers", "update"),
}


@pytest.fixture(scope="module")
def server(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedCluster]:
    with AuditedCluster(tmp_path_factory.mktemp("rbac") / "cluster", binaries, audit_reads=True) as cluster:
        for name in (_HOME, "team-a", "team-b"):
            cluster.kubectl("create", "namespace", name)
        yield cluster


@pytest.fixture
def helm(server: AuditedCluster, tmp_path: Path) -> Helm:
    return Helm.find(tmp_path, server.kubeconfig)


class Release:
    """An installed chart, and the operator's command line as its pod would have it."""

    def __init__(self, server: AuditedCluster, helm: Helm, name: str, folder: Path, *settings: str) -> None:
        helm("install", name, str(CHART), "--namespace", _HOME, "--set", f"fullnameOverride={name}", *settings)
        self._server = server
        self._folder = folder
        self.account = f"{name}-operator"
        self.user = f"system:serviceaccount:{_HOME}:{self.account}"
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        self.agent_tls = self._keys(f"{name}-agent-tls", "--tls-cert", "--tls-key", "--tls-client-ca")
        operator_tls = self._keys(f"{name}-operator-tls", "--agent-cert", "--agent-key", "--agent-ca")
        self.operator = (*operator_tls, "--agent-name", "tidelane-agent", "--kubeconfig", str(self._kubeconfig()))

    def granted(self, kind: str, *scope: str, name: str = "") -> set[tuple[str, str, str]]:
        """By the role of that name, or else of its account's."""
        role = json.loads(self._server.kubectl("get", kind, name or self.account, "-o", "json", *scope))
        return {
            (group, resource, verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def _keys(self, secret: str, *flags: str) -> tuple[str, ...]:
        data = json.loads(self._server.kubectl("get", "secret", secret, "-o", "json", namespace=_HOME))["data"]
        words: list[str] = []
        for flag, key in zip(flags, ("tls.crt", "tls.key", "ca.crt"), strict=True):
            path = self._folder / f"{secret}-{key}"
            path.write_bytes(base64.b64decode(data[key]))
            words += [flag, str(path)]
        return tuple(words)

    def _kubeconfig(self) -> Path:
        """Of a pod with that account: a token, no certificate."""
        token = self._server.kubectl("create", "token", self.account, namespace=_HOME).strip()
        config: dict[str, Any] = json.loads(self._server.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        path = self._folder / "account.kubeconfig"
        path.write_text(json.dumps(config))
        return path


def _live(rig: OperatorRig) -> None:
    """Everything that happens to a service."""
    rig.apply(manifest(replicas=2))
    rig.until_serving()
    # There and back again: the event that tells of the first is counted up at the third.
    for generation, tpot in enumerate(("40ms", "50ms", "40ms"), start=2):
        rig.kubectl("patch", "tlsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": slo(tpot)}}))
        rig.until_serving(generation)
    rig.kubectl("scale", "tlsvc", "chat", "--replicas=1")
    rig.until_serving(generation=5)
    assert "Placed" in rig.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    rig.kubectl("delete", "tlsvc", "chat", "--timeout=60s")
    rig.until_gone("service")


def _forbidden(rig: OperatorRig) -> list[str]:
    lines = (rig.folder / "operator.log").read_text(errors="replace").splitlines()
    return [line for line in lines if "orbidden" in line or " 403" in line]


def test_everywhere_it_uses_every_right_that_it_has(server: AuditedCluster, helm: Helm, tmp_path: Path) -> None:
    release = Release(server, helm, "everywhere", tmp_path)
    with OperatorRig(server, "team-a", tmp_path) as rig:
        assert publishable(rig.address), "without an address for EndpointSlices their rights cannot be shown"
        rig.start_agent("node-a", "--cpu-slots", "2", *release.agent_tls)
        server.kubectl("apply", "-f", str(_POLICY))
        rig.start_operator(*release.operator, everywhere=True, agents_at="dns:localhost")
        _live(rig)
        rig.end("operator")
        assert _forbidden(rig) == []
    granted = release.granted("clusterrole")
    used = set(server.used(release.user))
    # Discovery and the like have no resource. Refused requests show in the log, as above.
    assert granted - used == _ASKED_BY_THE_SERVER
    assert used - granted == set()


def test_in_one_namespace_it_needs_no_right_elsewhere(server: AuditedCluster, helm: Helm, tmp_path: Path) -> None:
    settings = ("--set", "operator.namespaces={team-b}", "--set", "crds.install=false", "--set", "rbac.aggregate=false")
    release = Release(server, helm, "single", tmp_path, *settings)
    with OperatorRig(server, "team-b", tmp_path) as rig:
        rig.start_agent("node-b", "--cpu-slots", "2", *release.agent_tls)
        rig.start_operator(*release.operator)
        _live(rig)
        rig.end("operator")
        assert _forbidden(rig) == []
    # It asks for policies, which are the cluster's, and does without where it is refused.
    beyond = set(server.used(release.user)) - release.granted("role", "--namespace", "team-b")
    assert beyond == {("tidelane.dev", "slopolicies", "list")}
    with pytest.raises(KubectlError, match="orbidden"):
        server.kubectl("get", "tlsvc", "--as", release.user, namespace="team-a")


def test_two_operators_need_of_leases_their_own_alone(server: AuditedCluster, helm: Helm, tmp_path: Path) -> None:
    settings = ("--set", "operator.namespaces={team-b}", "--set", "crds.install=false", "--set", "rbac.aggregate=false")
    release = Release(server, helm, "pair", tmp_path, *settings, "--set", "operator.replicas=2")
    lease = ("--lease", f"{_HOME}/{release.account}")
    urls = [f"http://127.0.0.1:{free_port()}/healthz" for _ in range(2)]
    with OperatorRig(server, "team-b", tmp_path) as rig:
        rig.start_agent("node-b", "--cpu-slots", "2", *release.agent_tls)
        rig.start_operator(*release.operator, *lease, "--liveness", urls[0])
        until(lambda: probed(urls[0]) == {"control": "alive"}, "one acts")
        rig.start_operator(*release.operator, *lease, "--liveness", urls[1], name="second")
        until(lambda: probed(urls[1]) == {"control": "standing by"}, "the other stands by")
        rig.apply(manifest())
        rig.until_serving()
        assert rig.end("operator") == 0
        until(lambda: probed(urls[1]) == {"control": "alive"}, "the other acts")
        rig.kubectl("delete", "tlsvc", "chat", "--timeout=60s")
        rig.end("second")
        assert _forbidden(rig) == []
    granted = release.granted("role", "--namespace", _HOME, name=f"{release.account}-lease")
    assert granted == {each for each in server.used(release.user) if each[1] == "leases"}

    def may(verb: str, name: str) -> bool:
        try:
            server.kubectl("auth", "can-i", verb, f"leases/{name}", "--as", release.user, namespace=_HOME)
        except KubectlError:
            return False
        return True

    asked = [(verb, name) for verb in ("get", "update", "delete") for name in (release.account, "another")]
    assert [each for each in asked if may(*each)] == [("get", release.account), ("update", release.account)]


@pytest.mark.parametrize("resource", ["services", "endpointslices.discovery.k8s.io"])
def test_to_apply_what_is_not_there_takes_the_right_to_create(server: AuditedCluster, resource: str) -> None:
    kind, _, group = resource.partition(".")
    child = {
        "apiVersion": f"{group}/v1".removeprefix("/"),
        "kind": {"services": "Service", "endpointslices": "EndpointSlice"}[kind],
        "metadata": {"name": "child"},
        **({"addressType": "IPv4", "endpoints": []} if group else {"spec": {"ports": [{"port": 80}]}}),
    }

    def apply() -> str:
        words = ("apply", "--server-side", "--validate=false", "--as", kind, "-f", "-")
        return server.kubectl(*words, namespace="team-a", stdin=json.dumps(child))

    def allow(role: str, *verbs: str) -> None:
        flags = [f"--verb={verb}" for verb in verbs]
        server.kubectl("create", "role", role, f"--resource={resource}", *flags, namespace="team-a")
        server.kubectl("create", "rolebinding", role, f"--role={role}", f"--user={kind}", namespace="team-a")

    allow(f"{kind}-patch", "get", "patch")
    with pytest.raises(KubectlError, match="cannot create"):
        apply()
    allow(f"{kind}-create", "create")
    assert "serverside-applied" in apply()


def test_an_agent_does_nothing_for_an_operator_with_an_agents_keys(
    server: AuditedCluster, helm: Helm, tmp_path: Path
) -> None:
    release = Release(server, helm, "stolen", tmp_path, "--set", "crds.install=false", "--set", "rbac.aggregate=false")
    with OperatorRig(server, "team-a", tmp_path) as rig:
        rig.start_agent("node-a", *release.agent_tls)
        rig.start_operator(*release.operator, "--agent-cert", release.agent_tls[1], "--agent-key", release.agent_tls[3])
        rig.apply(manifest("refused"))
        rig.until_condition("Scheduled", "False", "NoAgents", service="refused")
        assert rig.journal("started") == []
