"""The cluster as watches show it: reads are answered from the mirror, writes go to the API server and into the mirror.

Watches may lose things, with all that is behind them. So everything is listed anew from time to time; and where the API
server refuses a write because of the version or the uid, the next look at that service asks the API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from typing_extensions import override

from tidelane.operator.cluster import Cluster
from tidelane.operator.crd import KIND
from tidelane.operator.errors import Conflict
from tidelane.operator.kubernetes_cluster import KubernetesCluster
from tidelane.operator.mirror import Mirror, version_of
from tidelane.operator.policies import Labels, PolicyStatus
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, RawObject, Status

_KINDS: Final = (KIND, "Service", "EndpointSlice")


class WatchedCluster(Cluster):
    """`mirror` must hear what `api` is answered, and what watches tell."""

    def __init__(self, api: KubernetesCluster, mirror: Mirror) -> None:
        self._api = api
        self._mirror = mirror
        self._doubted: set[ObjectRef] = set()
        self._listed = False

    async def refresh(self) -> None:
        """Lists everything. Raises Retry."""
        for kind in _KINDS:
            for listed in await self._api.lists(kind):
                self._mirror.listed(kind, listed.namespace, listed.items, listed.version)
        self._listed = True

    @override
    async def service(self, ref: ObjectRef) -> RawObject | None:
        known = self._mirror.service(ref)
        if known and ref not in self._doubted:
            return known
        found = await self._api.service(ref)
        self._not_among([found] if found else [], [known] if known else [])
        return found

    @override
    async def services(self) -> Sequence[RawObject]:
        if not self._listed:
            await self.refresh()
        return self._mirror.services()

    @override
    async def policies(self) -> Sequence[RawObject] | None:
        return await self._api.policies()

    @override
    async def namespaces(self) -> Mapping[str, Labels] | None:
        return await self._api.namespaces()

    @override
    async def write_policy_status(self, name: str, uid: str, status: PolicyStatus) -> None:
        await self._api.write_policy_status(name, uid, status)

    @override
    async def children(self, ref: ObjectRef) -> Sequence[RawObject]:
        known = self._mirror.children(ref)
        if ref in self._doubted:
            found = await self._api.children(ref)
            self._not_among(found, known)
            self._doubted.discard(ref)
            return found
        if any(child["kind"] == "Service" for child in known):
            return known
        # One that somebody else made has no label, so that no watch tells of it.
        foreign = await self._api.child("Service", ref)
        return [foreign, *known] if foreign else known

    @override
    async def apply_child(self, manifest: RawObject) -> None:
        await self._api.apply_child(manifest)

    @override
    async def delete_child(self, kind: str, ref: ObjectRef, uid: str) -> None:
        known = self._mirror.known(kind, ref, uid)
        await self._api.delete_child(kind, ref, uid)
        self._not_among([], [known] if known else [])

    @override
    async def write_status(self, ref: ObjectRef, uid: str, status: Status) -> None:
        with self._doubting(ref):
            await self._api.write_status(ref, uid, status)

    @override
    async def set_finalizers(self, ref: ObjectRef, finalizers: Sequence[str], resource_version: str) -> None:
        with self._doubting(ref):
            await self._api.set_finalizers(ref, finalizers, resource_version)

    @override
    async def report(self, ref: ObjectRef, uid: str, report: Report) -> None:
        await self._api.report(ref, uid, report)

    @contextmanager
    def _doubting(self, ref: ObjectRef) -> Iterator[None]:
        try:
            yield
        except Conflict:
            self._doubted.add(ref)
            raise

    def _not_among(self, found: Sequence[RawObject], known: Sequence[RawObject]) -> None:
        """What is known and was not found is gone."""
        there = {each["metadata"]["uid"] for each in found}
        for each in known:
            if each["metadata"]["uid"] not in there:
                self._mirror.gone(each["kind"], ObjectRef.of(each), each["metadata"]["uid"], version_of(each))
