"""What the reconciler needs of a cluster. A real one and a local one keep this contract, shown by one test suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tidelane.operator.policies import Labels, PolicyStatus
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, RawObject, Status


class Cluster(Protocol):
    """InferenceServices and their children, and the policies for them.

    Every method raises Retry when the cluster cannot be reached or has changed under the caller's hands. A write to
    what no longer exists does nothing.
    """

    async def service(self, ref: ObjectRef) -> RawObject | None: ...

    async def services(self) -> Sequence[RawObject]: ...

    async def policies(self) -> Sequence[RawObject] | None:
        """Every SLOPolicy, none where the kind is not installed; None without a right to read them."""

    async def namespaces(self) -> Mapping[str, Labels] | None:
        """The labels of the namespaces that services are looked after in, by name; None without a right to."""

    async def write_policy_status(self, name: str, uid: str, status: PolicyStatus) -> None:
        """As `write_status`, of an SLOPolicy."""

    async def children(self, ref: ObjectRef) -> Sequence[RawObject]:
        """The Service of that name, whoever made it, and the EndpointSlices made for that InferenceService."""

    async def apply_child(self, manifest: RawObject) -> None:
        """Makes it so. Saying again what holds already changes nothing, not even the resourceVersion."""

    async def delete_child(self, kind: str, ref: ObjectRef, uid: str) -> None:
        """Deletes the child with that uid, and none that has come in its place."""

    async def write_status(self, ref: ObjectRef, uid: str, status: Status) -> None:
        """Replaces what the operator last wrote to the status of the object with that uid; the generation stays."""

    async def set_finalizers(self, ref: ObjectRef, finalizers: Sequence[str], resource_version: str) -> None:
        """Of the object at that version only. Without any left, an object being deleted is gone."""

    async def report(self, ref: ObjectRef, uid: str, report: Report) -> None:
        """Tells people who look at the object. Never fails."""
