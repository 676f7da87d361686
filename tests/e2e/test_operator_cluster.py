"""The real API server keeps the contract that the local cluster keeps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.harness import Cluster
from control_plane.cluster_contract import ClusterContract
from control_plane.lease_contract import LeasesContract
from tidelane.operator.crd import KIND
from tidelane.operator.errors import Deposed, Refused, Retry
from tidelane.operator.kubernetes_cluster import KubernetesCluster, connect
from tidelane.operator.kubernetes_lease import KubernetesLease
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef

pytestmark = pytest.mark.cluster


class KubectlUser:
    def __init__(self, api_server: Cluster, namespace: str, cluster: KubernetesCluster) -> None:
        self._api_server = api_server
        self.namespace = namespace
        self.cluster = cluster

    async def apply(self, manifest: dict[str, Any]) -> None:
        self._api_server.kubectl("apply", "-f", "-", namespace=self.namespace, stdin=json.dumps(manifest))

    async def delete(self, ref: ObjectRef, kind: str = KIND) -> None:
        self._api_server.kubectl("delete", kind, ref.name, "--wait=false", namespace=self.namespace)


@pytest.fixture
def user(installed: Cluster, namespace: str, kubernetes: KubernetesCluster) -> KubectlUser:
    return KubectlUser(installed, namespace, kubernetes)


async def test_a_kind_that_is_not_installed_is_no_absent_object(kubernetes: KubernetesCluster) -> None:
    with pytest.raises(Retry, match="404"):
        await kubernetes._request("GET", "/apis/tidelane.dev/v1alpha1/namespaces/default/nothings/chat")


async def test_without_a_right_to_policies_and_namespaces_it_goes_on(installed: Cluster, namespace: str) -> None:
    async with await connect(str(installed.kubeconfig)) as client:
        client.set_default_header("Impersonate-User", "nobody")
        assert await KubernetesCluster(client).policies() is None
        assert await KubernetesCluster(client).namespaces() is None
        assert await KubernetesCluster(client, [namespace]).namespaces() is None


async def test_of_a_kind_that_is_not_installed_there_are_none(
    kubernetes: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelane.operator.kubernetes_cluster.POLICY_PLURAL", "nothings")
    assert await kubernetes.policies() == ()


async def test_what_is_said_again_is_one_event(
    installed: Cluster, namespace: str, kubernetes: KubernetesCluster
) -> None:
    def events() -> list[tuple[str, str, int]]:
        found = json.loads(installed.kubectl("get", "events", "-o", "json", namespace=namespace))["items"]
        return sorted((each["involvedObject"]["uid"], each["message"], each["count"]) for each in found)

    chat = ObjectRef(namespace, "chat")
    for message in ("no room", "no room", "it serves", "no room"):
        await kubernetes.report(chat, "uid-1", Report("Scheduled", message))
    await kubernetes.report(chat, "uid-2", Report("Scheduled", "no room"))
    assert events() == [("uid-1", "it serves", 1), ("uid-1", "no room", 3), ("uid-2", "no room", 1)]

    # The API server forgets Events after an hour.
    installed.kubectl("delete", "events", "--all", namespace=namespace)
    await kubernetes.report(chat, "uid-1", Report("Scheduled", "no room"))
    assert events() == [("uid-1", "no room", 1)]


async def test_who_may_not_write_still_reads(installed: Cluster, namespace: str) -> None:
    async with await connect(str(installed.kubeconfig)) as client:
        deposed = KubernetesCluster(client, [namespace], may_write=lambda: False)
        assert set(await deposed.namespaces() or ()) == {namespace}
        with pytest.raises(Deposed):
            await deposed.delete_child("Service", ObjectRef(namespace, "chat"), "uid")


@pytest.fixture
async def leases(installed: Cluster, namespace: str) -> AsyncIterator[KubernetesLease]:
    async with await connect(str(installed.kubeconfig)) as client:
        yield KubernetesLease(client, ObjectRef(namespace, "operator"))


class TestKubernetesLease(LeasesContract):
    async def test_one_that_says_nothing_is_free(
        self, leases: KubernetesLease, installed: Cluster, namespace: str
    ) -> None:
        empty = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "operator"}}
        installed.kubectl("create", "-f", "-", namespace=namespace, stdin=json.dumps(empty))
        found = await leases.read()
        assert found is not None
        assert (found.holder, found.duration_s) == ("", 15)
        assert (await leases.replace(found, "one", 15, 1)).holder == "one"

    async def test_a_missing_right_is_named(self, installed: Cluster, namespace: str) -> None:
        async with await connect(str(installed.kubeconfig)) as client:
            client.set_default_header("Impersonate-User", "nobody")
            with pytest.raises(Refused, match="403 no right to it: get, create and update on leases"):
                await KubernetesLease(client, ObjectRef(namespace, "operator")).read()

    @pytest.mark.parametrize(
        ("where", "name", "said"),
        [("nowhere", "operator", "404 .* no such namespace"), ("default", "A_b", "422 it cannot have that name")],
    )
    async def test_a_place_where_none_can_be_is_named(
        self, installed: Cluster, where: str, name: str, said: str
    ) -> None:
        async with await connect(str(installed.kubeconfig)) as client:
            lease = KubernetesLease(client, ObjectRef(where, name))
            assert await lease.read() is None
            with pytest.raises(Refused, match=said):
                await lease.create("one", 15)


class TestKubernetesCluster(ClusterContract):
    pass
