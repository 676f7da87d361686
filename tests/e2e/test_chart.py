"""What helm makes of the chart: accepted by a real API server, and safe by default."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cluster.harness import Binaries, Cluster, KubectlError
from tidelane.cli import agent as cli_agent
from tidelane.cli import operator as cli_operator
from tidelane.cli.main import main

from .chart_rig import CHART, VALUES, Helm, HelmError, Manifest, one

pytestmark = pytest.mark.cluster

NAMESPACES = ("tidelane-system", "tidelane-agents", "team-a", "team-b")
# helm writes these itself; the API server has no such kind.
_FOREIGN = "monitoring.coreos.com/v1"


@pytest.fixture(scope="module")
def server(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of its own: a release owns its CRDs, and that of the other tests has them already."""
    with Cluster(tmp_path_factory.mktemp("chart") / "cluster", binaries) as cluster:
        for name in NAMESPACES:
            cluster.kubectl("create", "namespace", name)
        yield cluster


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm.find(tmp_path_factory.mktemp("helm"))


@pytest.fixture
def helm(server: Cluster, tmp_path: Path) -> Helm:
    return Helm.find(tmp_path, server.kubeconfig)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_finds_no_fault(offline: Helm, values: Path) -> None:
    assert "0 chart(s) failed" in offline("lint", "--strict", str(CHART), "--values", str(values))


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_api_server_knows_every_field(server: Cluster, offline: Helm, values: Path) -> None:
    rendered = [each for each in offline.render("--values", str(values)) if each["apiVersion"] != _FOREIGN]
    wanted = sorted(f"{each['kind']}/{each['metadata']['name']}".lower() for each in rendered)
    # A server-side apply, since some of the namespaces and roles are there.
    said = server.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-o", "name"),
        *("-f", "-"),
        stdin=yaml.safe_dump_all(rendered),
    )
    taken = [f"{line.split('/')[0].split('.')[0]}/{line.split('/')[1]}" for line in said.split()]
    assert sorted(taken) == wanted


def test_a_field_that_is_misspelt_is_refused(server: Cluster, offline: Helm) -> None:
    # Were it not, the test above could not fail.
    wrong = one(offline.render(), "DaemonSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(KubectlError, match="readynessProbe"):
        server.kubectl(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"), stdin=json.dumps(wrong)
        )


def test_the_operator_passes_the_restricted_pod_security_and_the_agent_only_privileged(
    server: Cluster, offline: Helm
) -> None:
    rendered = offline.render()
    pods = {
        "operator": one(rendered, "Deployment")["spec"]["template"],
        "agent": one(rendered, "DaemonSet")["spec"]["template"],
        "test": one(rendered, "Pod"),
    }

    def refused(pod: str, level: str) -> str:
        server.kubectl("label", "namespace", "team-b", f"pod-security.kubernetes.io/enforce={level}", "--overwrite")
        spec = pods[pod]["spec"]
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec}
        try:
            server.kubectl("create", "--dry-run=server", "-f", "-", namespace="team-b", stdin=json.dumps(manifest))
        except KubectlError as error:
            return str(error)
        return ""

    assert refused("operator", "restricted") == ""
    assert refused("test", "restricted") == ""
    assert "hostPath" in refused("agent", "baseline")
    assert refused("agent", "privileged") == ""
    # Of the node it takes its folders and nothing more.
    assert refused("agent", "baseline").count("violates") == 1
    assert "privileged=true" not in refused("agent", "baseline")
    server.kubectl("label", "namespace", "team-b", "pod-security.kubernetes.io/enforce-")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("operator.replicas=6", "operator.replicas|replicas"),
        ("tls.mode=off", "mode"),
        ("tls.mode=secrets", "[sS]ecret"),
        ("agent.imag.tag=1", "imag"),
        ("agent.createNamespace=true", "set agent.namespace"),
        ("agent.devices=tpu", "devices"),
        ("agent.enabled=false", "set operator.extraAgents"),
    ],
)
def test_wrong_values_are_refused_by_name(offline: Helm, setting: str, said: str) -> None:
    with pytest.raises(HelmError, match=said):
        offline.render("--set", setting)


def test_several_operators_have_a_lease_and_one_has_none(offline: Helm) -> None:
    def operator(*settings: str) -> tuple[list[str], set[str], list[str]]:
        """Arguments about the Lease, what is in its affinity, and what there is beside it."""
        rendered = offline.render(*settings)
        pod = one(rendered, "Deployment")["spec"]["template"]["spec"]
        arguments = [each for each in pod["containers"][0]["args"] if "lease" in each]
        found = sorted(
            f"{each['kind']} {each['metadata']['name']}"
            for each in rendered
            if each["kind"] == "PodDisruptionBudget" or each["metadata"]["name"].endswith("-lease")
        )
        return arguments, set(pod.get("affinity", {})), found

    assert operator() == ([], set(), [])
    assert operator("--set", "operator.replicas=2") == (
        ["--lease=tidelane-system/tidelane-operator"],
        {"podAntiAffinity"},
        [
            "PodDisruptionBudget tidelane-operator",
            "Role tidelane-operator-lease",
            "RoleBinding tidelane-operator-lease",
        ],
    )
    own = ("--set", "operator.replicas=2", "--set-json", 'operator.affinity={"nodeAffinity": {}}')
    assert operator(*own)[1] == {"nodeAffinity"}


def test_crds_are_kept_or_left_out_as_told(offline: Helm) -> None:
    crds = {path.stem for path in (CHART.parents[1] / "crds").glob("*.yaml")}

    def annotations(*arguments: str) -> dict[str, dict[str, Any]]:
        found = (each for each in offline.render(*arguments) if each["kind"] == "CustomResourceDefinition")
        return {each["spec"]["names"]["plural"]: each["metadata"]["annotations"] for each in found}

    assert annotations().keys() == crds
    assert {each["helm.sh/resource-policy"] for each in annotations().values()} == {"keep"}
    assert all("helm.sh/resource-policy" not in each for each in annotations("--set", "crds.keep=false").values())
    assert annotations("--set", "crds.install=false") == {}


def test_a_release_keeps_its_keys_through_an_upgrade_and_its_kinds_through_the_end(server: Cluster, helm: Helm) -> None:
    scope = ("--namespace", "tidelane-system")

    def state() -> tuple[Manifest, Manifest, Manifest]:
        found: list[Manifest] = [
            json.loads(server.kubectl("get", kind, name, "-o", "json", namespace="tidelane-system"))
            for kind, name in (
                ("secret", "tidelane-operator-tls"),
                ("secret", "tidelane-agent-tls"),
                ("daemonset", "tidelane-agent"),
            )
        ]
        return found[0]["data"], found[1]["data"], found[2]["spec"]["template"]

    helm("install", "tidelane", str(CHART), *scope)
    before = state()
    helm("upgrade", "tidelane", str(CHART), *scope, "--set", "operator.logLevel=debug")
    # The same pod template: engines are not restarted for a change that is not theirs.
    assert state() == before
    server.kubectl("delete", "secret", "tidelane-agent-tls", namespace="tidelane-system")
    helm("upgrade", "tidelane", str(CHART), *scope)
    renewed = state()
    assert all(old != new for old, new in zip(before, renewed, strict=True))
    helm("rollback", "tidelane", "1", *scope)

    service = {
        "apiVersion": "tidelane.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": "builtin://smollm2-135m-instruct"},
            "slo": {"ttft": "1s", "tpot": "100ms"},
            "replicas": 1,
        },
    }
    server.kubectl("apply", "-f", "-", namespace="team-a", stdin=json.dumps(service))
    helm("uninstall", "tidelane", *scope)
    left = server.kubectl("get", "deploy,ds,secret,sa,svc,netpol", "-o", "name", namespace="tidelane-system").split()
    assert [each for each in left if "tidelane" in each] == []
    assert server.kubectl("get", "tlsvc", "-o", "name", namespace="team-a").split() == [
        "inferenceservice.tidelane.dev/chat"
    ]
    # Installed again, it takes up what it left.
    helm("install", "tidelane", str(CHART), *scope)
    helm("uninstall", "tidelane", *scope)


def test_generated_keys_have_an_authority_for_each_side(offline: Helm) -> None:
    rendered = offline.render()

    def certificates(component: str) -> tuple[x509.Certificate, x509.Certificate]:
        data = one(rendered, "Secret", component)["data"]
        own, other = (x509.load_pem_x509_certificate(base64.b64decode(data[key])) for key in ("tls.crt", "ca.crt"))
        return own, other

    def signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError):  # another's signature, or another's name
            return False
        return True

    operator, agents_authority = certificates("operator")
    agent, operators_authority = certificates("agent")
    assert signed(operator, operators_authority)
    assert signed(agent, agents_authority)
    # An agent lets in whom its ca.crt signed, and that is no agent.
    assert not signed(agent, operators_authority)
    names = agent.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["tidelane-agent"]
    assert isinstance(agent.public_key(), rsa.RSAPublicKey | ec.EllipticCurvePublicKey)


def test_only_the_operator_reaches_agents(offline: Helm) -> None:
    policy = one(offline.render(), "NetworkPolicy", "agent")["spec"]
    (control,) = (rule for rule in policy["ingress"] if rule["ports"][0]["port"] == 50061)
    operator = one(offline.render(), "Deployment")
    (peer,) = control["from"]
    assert peer["podSelector"]["matchLabels"].items() <= operator["spec"]["template"]["metadata"]["labels"].items()
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "tidelane-system"}
    assert len(policy["ingress"]) == 2


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_programs_understand_their_arguments(offline: Helm, values: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def runs(name: str) -> Callable[[object], int]:
        def run(args: object) -> int:
            ran.append(name)
            return 0

        return run

    monkeypatch.setattr(cli_operator, "run", runs("operator"))
    monkeypatch.setattr(cli_agent, "run", runs("agent"))
    rendered = offline.render("--values", str(values))
    workloads = [each for each in rendered if each["kind"] in ("Deployment", "DaemonSet")]
    for workload in workloads:
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert main(container["args"]) == 0
    assert ran == [workload["metadata"]["name"].rsplit("-", 1)[1] for workload in workloads]
    assert "operator" in ran


def test_the_operator_is_told_what_its_user_lacks(offline: Helm) -> None:
    (container,) = one(offline.render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    # Seen from its image: without a home it ends when it is imported, without a name when kopf starts.
    assert {"HOME", "USER"} <= {each["name"] for each in container["env"]}
