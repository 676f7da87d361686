"""The real API server refuses what the offline validation refuses, for the same field and rule."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from cluster.harness import Cluster, KubectlError
from control_plane.wrong_manifests import POLICY, PROFILE, RIGHT, WRONG, WRONG_POLICIES, WRONG_PROFILES, Wrong
from tidelane.operator.crd import CLUSTER_WIDE, PLURALS

pytestmark = pytest.mark.cluster

# The API server adds these to what is wrong, for `spec.replicas` of any resource and for rules that it did not try.
_ITS_OWN = {"<nil>", ".spec.replicas"}


@pytest.fixture(scope="module")
def api(installed: Cluster) -> client.CustomObjectsApi:
    connected = config.new_client_from_config(str(installed.kubeconfig))  # type: ignore[no-untyped-call]
    return client.CustomObjectsApi(connected)


def refusal(api: client.CustomObjectsApi, namespace: str, manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Field and message of every cause."""
    kind = ("tidelane.dev", "v1alpha1")
    plural = PLURALS[manifest["kind"]]
    cluster_wide = partial(api.create_cluster_custom_object, *kind, plural)
    namespaced = partial(api.create_namespaced_custom_object, *kind, namespace, plural)
    create = cluster_wide if manifest["kind"] in CLUSTER_WIDE else namespaced
    with pytest.raises(ApiException) as caught:
        create(manifest, field_validation="Strict")
    body = json.loads(caught.value.body or "")
    causes = [(cause["field"], cause["message"]) for cause in body.get("details", {}).get("causes", ())]
    return causes or [(field, "unknown field") for field in re.findall(r'unknown field "([^"]+)"', body["message"])]


@pytest.mark.parametrize("wrong", WRONG + WRONG_POLICIES + WRONG_PROFILES, ids=str)
def test_same_fields_and_rule(api: client.CustomObjectsApi, wrong: Wrong) -> None:
    causes = refusal(api, "default", wrong.manifest)
    assert {field for field, _ in causes} - _ITS_OWN == set(wrong.fields)
    assert any(field == wrong.refused_field and wrong.rule in message for field, message in causes)


def test_kubectl_says_it_in_so_many_words(installed: Cluster, namespace: str) -> None:
    [wrong] = [each for each in WRONG if each.field == "spec.slo.tpot" and each.value == "0s"]
    with pytest.raises(KubectlError, match=r"spec\.slo\.tpot: Invalid value.*longer than 0 and at most 1h"):
        installed.kubectl("apply", "-f", "-", namespace=namespace, stdin=json.dumps(wrong.manifest))


def test_defaults_make_no_difference_to_gitops(installed: Cluster, namespace: str) -> None:
    text = json.dumps(RIGHT)
    apply = ("apply", "--server-side", "-f", "-", "-o", "json")
    # The second apply of an object that no operator has seen stores the default of its status, once.
    first, second, third = (json.loads(installed.kubectl(*apply, namespace=namespace, stdin=text)) for _ in range(3))
    assert first["spec"]["execution"] == {"mode": "Lanes", "lateRequests": "Serve"}
    assert (second["spec"], second["metadata"]["generation"]) == (first["spec"], 1)
    assert third == second


def test_scale_subresource(installed: Cluster, namespace: str) -> None:
    installed.kubectl("apply", "-f", "-", namespace=namespace, stdin=json.dumps(RIGHT))
    installed.kubectl("scale", "tlsvc/chat", "--replicas=3", namespace=namespace)
    found = installed.kubectl("get", "tlsvc", "chat", "-o", "jsonpath={.spec.replicas}", namespace=namespace)
    assert found == "3"


@pytest.mark.parametrize("manifest", [POLICY, PROFILE], ids=lambda manifest: manifest["kind"])
def test_other_kinds_are_stored_as_they_are_written(installed: Cluster, manifest: dict[str, Any]) -> None:
    try:
        installed.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))
        plural = PLURALS[manifest["kind"]]
        found = json.loads(installed.kubectl("get", plural, manifest["metadata"]["name"], "-o", "json"))
        assert found["spec"] == manifest["spec"]
        assert found["metadata"]["generation"] == 1
        names = installed.kubectl("get", "tidelane", "-A", "-o", "name").splitlines()
        assert f"{manifest['kind'].lower()}.tidelane.dev/{manifest['metadata']['name']}" in names
    finally:
        installed.kubectl("delete", "-f", "-", stdin=json.dumps(manifest))


def test_the_table_of_policies(installed: Cluster) -> None:
    try:
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(POLICY))
        header, row = installed.kubectl("get", "slop").splitlines()
    finally:
        installed.kubectl("delete", "-f", "-", stdin=json.dumps(POLICY))
    assert header.split() == ["NAME", "MODE", "PRIORITY", "MATCHED", "CHANGED", "BREACH", "ATTAINABLE", "AGE"]
    assert row.split()[:3] == ["gold", "Enforce", "10"]
