"""The local cluster keeps the contract, and tells of every change."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from control_plane.cluster_contract import ClusterContract, status_of
from control_plane.wrong_manifests import POLICY, RIGHT
from tidelane.operator import children
from tidelane.operator.crd import KIND, POLICY_KIND
from tidelane.operator.local_cluster import LocalCluster
from tidelane.operator.reports import Report
from tidelane.operator.resources import FINALIZER, ObjectRef, Service
from tidelane.operator.validation import Schemas


class LocalUser:
    namespace = "default"

    def __init__(self) -> None:
        self.changes: list[ObjectRef] = []
        self.reports: list[tuple[ObjectRef, Report]] = []
        self.policy_changes = 0
        self.schemas = Schemas()
        self.cluster = LocalCluster(
            lambda: datetime(2030, 1, 1, tzinfo=UTC),
            self.changes.append,
            lambda ref, report: self.reports.append((ref, report)),
            self._policies_changed,
        )

    async def apply(self, manifest: dict[str, Any]) -> None:
        self.cluster.put(self.schemas.of(manifest["kind"]).with_defaults(manifest))

    async def delete(self, ref: ObjectRef, kind: str = KIND) -> None:
        self.cluster.delete(ref, kind)

    def _policies_changed(self) -> None:
        self.policy_changes += 1


@pytest.fixture
def user() -> LocalUser:
    return LocalUser()


class TestLocalCluster(ClusterContract):
    pass


async def test_every_change_is_told_and_only_changes(user: LocalUser) -> None:
    ref = ObjectRef("default", "chat")
    await user.apply(dict(RIGHT))
    await user.apply(dict(RIGHT))
    raw = await user.cluster.service(ref)
    assert raw
    service = Service.parse(raw)
    await user.cluster.write_status(ref, service.uid, status_of(service))
    await user.cluster.apply_child(children.endpoint_slice(service, 0, "10.1.2.3", 8000))
    assert user.changes == [ref, ref, ref]


async def test_what_is_read_is_a_copy(user: LocalUser) -> None:
    await user.apply(dict(RIGHT))
    ref = ObjectRef("default", "chat")
    read: Any = await user.cluster.service(ref)
    read["metadata"]["finalizers"] = [FINALIZER]
    again: Any = await user.cluster.service(ref)
    assert "finalizers" not in again["metadata"]


async def test_changes_of_policies_are_told_apart(user: LocalUser) -> None:
    await user.apply(dict(POLICY))
    await user.apply(dict(POLICY))
    await user.delete(ObjectRef("", "gold"), POLICY_KIND)
    assert user.policy_changes == 2
    assert user.changes == []
