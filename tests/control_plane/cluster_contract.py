"""What every Cluster must do: run on the local one here, and on a real API server in tests/e2e."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import pytest

from control_plane.wrong_manifests import POLICY, RIGHT
from tidelane.operator import children
from tidelane.operator.cluster import Cluster
from tidelane.operator.crd import KIND, POLICY_KIND
from tidelane.operator.errors import Retry
from tidelane.operator.policies import Policy, PolicyStatus
from tidelane.operator.reports import Report
from tidelane.operator.resources import FINALIZER, ObjectRef, Service, Status
from tidelane.rpc.wire import ExecutionMode, LateRequests

# The status of what no operator has seen, by the schema's default.
NEVER_SEEN = {"observedGeneration": -1}


class User(Protocol):
    """Somebody with kubectl."""

    namespace: str
    cluster: Cluster

    async def apply(self, manifest: dict[str, Any]) -> None: ...

    async def delete(self, ref: ObjectRef, kind: str = KIND) -> None: ...


def status_of(service: Service, reason: str = "Serving", *more: str) -> Status:
    conditions = [
        {
            "type": name,
            "status": "True",
            "reason": reason,
            "message": "",
            "observedGeneration": service.generation,
            "lastTransitionTime": "2030-01-01T00:00:00Z",
        }
        for name in ("Ready", *more)
    ]
    return {
        "observedGeneration": service.generation,
        "conditions": conditions,  # type: ignore[typeddict-item]
        "placements": [{"replica": 0, "node": "a"}],
    }


class ClusterContract:
    """Subclasses have a fixture `user`."""

    @pytest.fixture
    async def ref(self, user: User) -> ObjectRef:
        manifest = copy.deepcopy(dict(RIGHT))
        manifest["metadata"] |= {"namespace": user.namespace}
        await user.apply(manifest)
        return ObjectRef(user.namespace, "chat")

    async def edit(self, user: User, **spec: Any) -> None:
        manifest = copy.deepcopy(dict(RIGHT))
        manifest["metadata"] |= {"namespace": user.namespace}
        manifest["spec"] |= spec
        await user.apply(manifest)

    async def read(self, user: User, ref: ObjectRef) -> Service:
        raw = await user.cluster.service(ref)
        assert raw is not None
        return Service.parse(raw)

    async def test_what_is_not_there(self, user: User) -> None:
        nobody = ObjectRef(user.namespace, "nobody")
        assert await user.cluster.service(nobody) is None
        assert list(await user.cluster.children(nobody)) == []
        await user.cluster.write_status(nobody, "uid", {})
        await user.cluster.set_finalizers(nobody, [FINALIZER], "1")
        await user.cluster.delete_child("Service", nobody, "uid")

    async def test_a_service_with_defaults(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        assert service.generation == 1
        assert service.uid
        assert not isinstance(service.spec, str)
        assert service.spec.devices == 1
        assert ref in [ObjectRef.of(each) for each in await user.cluster.services()]

    async def test_what_becomes_of_late_requests(self, user: User, ref: ObjectRef) -> None:
        served = (await self.read(user, ref)).spec
        await self.edit(user, execution={"lateRequests": "Refuse"})
        refused = (await self.read(user, ref)).spec
        assert not isinstance(served, str)
        assert not isinstance(refused, str)
        assert (served.late_requests, refused.late_requests) == (LateRequests.SERVE, LateRequests.REFUSE)
        assert refused.mode is served.mode is ExecutionMode.LANES

    async def test_generation_counts_specs_only(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        await user.cluster.write_status(ref, service.uid, status_of(service))
        await user.cluster.set_finalizers(ref, [FINALIZER], (await self.read(user, ref)).resource_version)
        await self.edit(user)
        assert (await self.read(user, ref)).generation == 1
        await self.edit(user, replicas=2)
        after = await self.read(user, ref)
        assert after.generation == 2
        assert after.uid == service.uid
        assert after.status == status_of(service)
        assert after.finalizers == (FINALIZER,)

    async def test_status_is_replaced_as_a_whole(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        await user.cluster.write_status(ref, service.uid, {**status_of(service, "Starting", "Stalled"), "ttft": "1s"})
        await user.cluster.write_status(ref, service.uid, status_of(service))
        assert (await self.read(user, ref)).status == status_of(service)

    async def test_the_same_status_again_is_no_change(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        await user.cluster.write_status(ref, service.uid, status_of(service))
        before = await self.read(user, ref)
        await user.cluster.write_status(ref, service.uid, status_of(service))
        assert (await self.read(user, ref)).resource_version == before.resource_version

    async def test_status_of_another_uid_is_refused(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        with pytest.raises(Retry):
            await user.cluster.write_status(ref, "0" * 36, status_of(service))
        assert (await self.read(user, ref)).status == NEVER_SEEN

    async def test_finalizers_of_an_older_version_are_refused(self, user: User, ref: ObjectRef) -> None:
        old = await self.read(user, ref)
        await self.edit(user, replicas=2)
        with pytest.raises(Retry):
            await user.cluster.set_finalizers(ref, [FINALIZER], old.resource_version)
        assert (await self.read(user, ref)).finalizers == ()

    async def test_deletion_waits_for_finalizers(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        await user.cluster.set_finalizers(ref, [FINALIZER, "example.com/other"], service.resource_version)
        await user.delete(ref)
        deleting = await self.read(user, ref)
        assert deleting.deleting
        await user.cluster.write_status(ref, deleting.uid, status_of(deleting))
        await user.cluster.set_finalizers(ref, ["example.com/other"], (await self.read(user, ref)).resource_version)
        assert (await self.read(user, ref)).finalizers == ("example.com/other",)
        await user.cluster.set_finalizers(ref, [], (await self.read(user, ref)).resource_version)
        assert await user.cluster.service(ref) is None

    async def test_deletion_without_finalizers_is_at_once(self, user: User, ref: ObjectRef) -> None:
        await user.delete(ref)
        assert await user.cluster.service(ref) is None

    async def test_children(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        wanted = [children.service_manifest(service), children.endpoint_slice(service, 0, "10.1.2.3", 8000)]
        for manifest in wanted:
            await user.cluster.apply_child(manifest)
        found = await user.cluster.children(ref)
        assert [child["kind"] for child in found] == ["Service", "EndpointSlice"]
        assert all(children.matches(child, manifest) for child, manifest in zip(found, wanted, strict=True))
        assert all(children.is_owned(child, service.uid) for child in found)
        for manifest in wanted:
            await user.cluster.apply_child(manifest)
        again = await user.cluster.children(ref)
        versions = [[child["metadata"]["resourceVersion"] for child in each] for each in (found, again)]
        assert versions[0] == versions[1]

    async def test_a_child_moves_to_another_port(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        await user.cluster.apply_child(children.endpoint_slice(service, 0, "10.1.2.3", 8000))
        moved = children.endpoint_slice(service, 0, "10.1.2.4", 8001)
        await user.cluster.apply_child(moved)
        [child] = await user.cluster.children(ref)
        assert children.matches(child, moved)

    async def test_a_child_is_deleted_by_uid(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        await user.cluster.apply_child(children.service_manifest(service))
        [child] = await user.cluster.children(ref)
        with pytest.raises(Retry):
            await user.cluster.delete_child("Service", ref, "0" * 36)
        assert len(await user.cluster.children(ref)) == 1
        await user.cluster.delete_child("Service", ref, child["metadata"]["uid"])
        assert list(await user.cluster.children(ref)) == []

    async def test_a_report(self, user: User, ref: ObjectRef) -> None:
        service = await self.read(user, ref)
        for _ in range(2):
            await user.cluster.report(ref, service.uid, Report("Ready", "it serves"))
        await user.cluster.report(ObjectRef("no-such-namespace", "chat"), service.uid, Report("Ready", "never fails"))

    async def policy(self, user: User, name: str) -> Policy | None:
        found = [Policy.parse(each) for each in await user.cluster.policies() or ()]
        return next((each for each in found if each.name == name), None)

    async def test_a_policy_comes_changes_and_goes(self, user: User) -> None:
        name = f"gold-{user.namespace}"
        manifest = copy.deepcopy(dict(POLICY))
        manifest["metadata"] |= {"name": name}
        assert await self.policy(user, name) is None
        await user.apply(manifest)
        try:
            made = await self.policy(user, name)
            assert made
            assert (made.generation, made.enforced, made.status) == (1, True, NEVER_SEEN)
            status: PolicyStatus = {"observedGeneration": 1, "matched": 0, "services": []}
            await user.cluster.write_policy_status(name, made.uid, status)
            with pytest.raises(Retry):
                await user.cluster.write_policy_status(name, "0" * 36, {"matched": 7})
            manifest["spec"] |= {"mode": "DryRun"}
            await user.apply(manifest)
            tried = await self.policy(user, name)
            assert tried
            assert (tried.generation, tried.enforced, tried.status, tried.uid) == (2, False, status, made.uid)
        finally:
            await user.delete(ObjectRef("", name), POLICY_KIND)
        assert await self.policy(user, name) is None
        await user.cluster.write_policy_status(name, made.uid, status)

    async def test_a_namespace_has_its_name_for_a_label(self, user: User, ref: ObjectRef) -> None:
        labels = (await user.cluster.namespaces() or {})[ref.namespace]
        assert labels["kubernetes.io/metadata.name"] == ref.namespace
