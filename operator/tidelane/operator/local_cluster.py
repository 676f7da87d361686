"""The cluster, when there is none: objects in memory, under those of the API server's rules that the operator meets."""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from typing_extensions import override

from tidelane.operator.children import SERVICE_LABEL
from tidelane.operator.cluster import Cluster
from tidelane.operator.conditions import timestamp
from tidelane.operator.crd import KIND, POLICY_KIND
from tidelane.operator.errors import Retry
from tidelane.operator.policies import NAME_LABEL, Labels, PolicyStatus
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, RawObject, Status

Key = tuple[str, ObjectRef]


class LocalCluster(Cluster):
    """Not for several threads.

    `changed` hears the name of a service whenever it or a child of it has changed, `reported` what people should know,
    and `policies_changed` is called whenever a policy has.
    """

    def __init__(
        self,
        now: Callable[[], datetime],
        changed: Callable[[ObjectRef], None],
        reported: Callable[[ObjectRef, Report], None],
        policies_changed: Callable[[], None],
    ) -> None:
        self._now = now
        self._changed = changed
        self._reported = reported
        self._policies_changed = policies_changed
        self._objects: dict[Key, dict[str, Any]] = {}
        self._versions = itertools.count(1)

    def put(self, manifest: RawObject) -> None:
        """What `kubectl apply` does with a valid object of ours that has its defaults."""
        key = manifest["kind"], ObjectRef.of(manifest)
        old = self._objects.get(key)
        if old is None:
            self._create(key, manifest)
            return
        metadata = copy.deepcopy(old["metadata"])
        for field in ("labels", "annotations"):
            metadata.pop(field, None)
            if given := manifest["metadata"].get(field):
                metadata[field] = dict(given)
        if manifest["spec"] != old["spec"]:
            metadata["generation"] += 1
        self._replace(key, {**old, "metadata": metadata, "spec": copy.deepcopy(manifest["spec"])})

    def delete(self, ref: ObjectRef, kind: str = KIND) -> None:
        """What `kubectl delete --wait=false` does."""
        key = kind, ref
        found = self._objects.get(key)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return
        if not found["metadata"].get("finalizers"):
            self._remove(key)
            return
        deletion = {"deletionTimestamp": timestamp(self._now()), "generation": found["metadata"]["generation"] + 1}
        self._replace(key, {**found, "metadata": {**found["metadata"], **deletion}})

    @override
    async def service(self, ref: ObjectRef) -> RawObject | None:
        return copy.deepcopy(self._objects.get((KIND, ref)))

    @override
    async def services(self) -> Sequence[RawObject]:
        return [copy.deepcopy(each) for (kind, _), each in self._objects.items() if kind == KIND]

    @override
    async def policies(self) -> Sequence[RawObject]:
        return [copy.deepcopy(each) for (kind, _), each in self._objects.items() if kind == POLICY_KIND]

    @override
    async def namespaces(self) -> Mapping[str, Labels]:
        """Those of objects; they have the one label that every namespace of a real cluster has."""
        names = {ref.namespace for _, ref in self._objects if ref.namespace}
        return {name: {NAME_LABEL: name} for name in names}

    @override
    async def write_policy_status(self, name: str, uid: str, status: PolicyStatus) -> None:
        self._write_status((POLICY_KIND, ObjectRef("", name)), uid, status)

    @override
    async def children(self, ref: ObjectRef) -> Sequence[RawObject]:
        return [
            copy.deepcopy(each)
            for (kind, at), each in self._objects.items()
            if (kind == "Service" and at == ref)
            or (
                kind == "EndpointSlice"
                and at.namespace == ref.namespace
                and each["metadata"].get("labels", {}).get(SERVICE_LABEL) == ref.name
            )
        ]

    @override
    async def apply_child(self, manifest: RawObject) -> None:
        key = manifest["kind"], ObjectRef.of(manifest)
        old = self._objects.get(key)
        if old is None:
            self._create(key, manifest)
        else:
            self._replace(key, _merged(old, manifest))

    @override
    async def delete_child(self, kind: str, ref: ObjectRef, uid: str) -> None:
        found = self._objects.get((kind, ref))
        if found is None:
            return
        if found["metadata"]["uid"] != uid:
            raise Retry(f"{kind} {ref} is another one now", after_s=0.0)
        self._remove((kind, ref))

    @override
    async def write_status(self, ref: ObjectRef, uid: str, status: Status) -> None:
        self._write_status((KIND, ref), uid, status)

    @override
    async def set_finalizers(self, ref: ObjectRef, finalizers: Sequence[str], resource_version: str) -> None:
        key = KIND, ref
        found = self._objects.get(key)
        if found is None:
            return
        if found["metadata"]["resourceVersion"] != resource_version:
            raise Retry(f"{ref} has changed", after_s=0.0)
        if not finalizers and "deletionTimestamp" in found["metadata"]:
            self._remove(key)
            return
        self._replace(key, {**found, "metadata": {**found["metadata"], "finalizers": list(finalizers)}})

    @override
    async def report(self, ref: ObjectRef, uid: str, report: Report) -> None:
        self._reported(ref, report)

    def _write_status(self, key: Key, uid: str, status: Status | PolicyStatus) -> None:
        found = self._objects.get(key)
        if found is None:
            return
        if found["metadata"]["uid"] != uid:
            raise Retry(f"{key[1]} is another one now", after_s=0.0)
        self._replace(key, {**found, "status": copy.deepcopy(status)})

    def _create(self, key: Key, manifest: RawObject) -> None:
        made = copy.deepcopy(dict(manifest))
        made["metadata"] |= {
            **({"namespace": key[1].namespace} if key[1].namespace else {}),
            "uid": str(uuid.uuid4()),
            "generation": 1,
            "creationTimestamp": timestamp(self._now()),
        }
        self._store(key, made)

    def _replace(self, key: Key, changed: dict[str, Any]) -> None:
        if changed != self._objects[key]:
            self._store(key, changed)

    def _store(self, key: Key, stored: dict[str, Any]) -> None:
        self._objects[key] = {
            **stored,
            "metadata": {**stored["metadata"], "resourceVersion": str(next(self._versions))},
        }
        self._tell(key, stored)

    def _remove(self, key: Key) -> None:
        removed = self._objects.pop(key)
        self._tell(key, removed)

    def _tell(self, key: Key, stored: RawObject) -> None:
        if key[0] == POLICY_KIND:
            self._policies_changed()
            return
        name = stored["metadata"].get("labels", {}).get(SERVICE_LABEL) if key[0] == "EndpointSlice" else key[1].name
        if name:
            self._changed(ObjectRef(key[1].namespace, name))


def _merged(old: Any, new: Any) -> Any:
    """Maps key by key; all else, lists too, is replaced. Enough for children, whose fields never go away."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return copy.deepcopy(new)
