"""The example repository: every manifest is taken, a sync finds no difference, and what others wrote stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.harness import Cluster
from control_plane.gitops_health import health_of

from .operator_rig import OperatorRig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GITOPS = Path(__file__).parents[2] / "examples" / "gitops"
SYNC = ("--server-side", "--field-manager=sync", "-f", "-")


def rendered(cluster: Cluster, folder: Path) -> str:
    return cluster.kubectl("kustomize", str(folder))


def service(rig: OperatorRig) -> str:
    """As the repository has it, but in the test's namespace."""
    manifest = yaml.safe_load(rendered(rig.cluster, GITOPS / "services" / "production"))
    manifest["metadata"]["namespace"] = rig.namespace
    return json.dumps(manifest)


@pytest.mark.parametrize("folder", ["policies", "services/staging", "services/production"])
def test_the_api_server_takes_the_example(installed: Cluster, folder: str) -> None:
    for manifest in yaml.safe_load_all(rendered(installed, GITOPS / folder)):
        manifest["metadata"].pop("namespace", None)  # which need not be there
        installed.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(manifest))


def test_the_health_checks_get_into_argo_cds_settings(installed: Cluster, tmp_path: Path) -> None:
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "argocd-cm"},
        "data": {"url": "https://a"},
    }
    component = tmp_path / "health"
    component.mkdir()
    for part in (GITOPS / "argocd" / "health").iterdir():
        (component / part.name).write_bytes(part.read_bytes())
    (tmp_path / "argocd-cm.yaml").write_text(json.dumps(settings))
    kustomization = {"resources": ["argocd-cm.yaml"], "components": ["health"]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    [made] = yaml.safe_load_all(rendered(installed, tmp_path))
    assert made["metadata"]["name"] == "argocd-cm"
    check = (component / "health.lua").read_text()
    assert made["data"] == {
        "url": "https://a",
        "resource.customizations.health.tidelane.dev_InferenceService": check,
        "resource.customizations.health.tidelane.dev_SLOPolicy": check,
    }


def test_a_service_that_nobody_has_seen_is_in_progress(rig: OperatorRig) -> None:
    rig.kubectl("apply", *SYNC, stdin=service(rig))
    [made] = health_of([found(rig)])
    assert (made.argo, made.kstatus) == ("Progressing", "InProgress")


def test_a_sync_finds_no_difference_and_leaves_replicas_to_who_scales(rig: OperatorRig) -> None:
    rig.start_agent()
    rig.start_operator()
    rig.kubectl("apply", *SYNC, stdin=service(rig))
    rig.until_serving()
    assert differences(rig) == ""
    [serving] = health_of([found(rig)])
    assert (serving.argo, serving.kstatus) == ("Healthy", "Current")

    rig.kubectl("scale", "tlsvc/chat", "--replicas=0")
    rig.until_condition("Ready", "True", "ScaledToZero")
    assert differences(rig) == ""
    rig.kubectl("apply", *SYNC, stdin=service(rig))
    assert found(rig)["spec"]["replicas"] == 0


def found(rig: OperatorRig) -> dict[str, Any]:
    made = rig.get()
    assert made
    return made


def differences(rig: OperatorRig) -> str:
    """kubectl fails if there is any."""
    return rig.kubectl("diff", *SYNC, stdin=service(rig))
