"""Policies on a local cluster: who is told, and what is written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from typing_extensions import override

from tidelane.operator.crd import KIND, POLICY_KIND
from tidelane.operator.errors import Retry
from tidelane.operator.local_cluster import LocalCluster
from tidelane.operator.observation import Timing
from tidelane.operator.policies import PolicyStatus
from tidelane.operator.policy_reconcile import PolicyReconciler
from tidelane.operator.resources import ObjectRef, RawObject

from .policy_objects import policy_object, tpot
from .world import service_object

CHAT, OTHER = ObjectRef("default", "chat"), ObjectRef("default", "other")


class WatchedCluster(LocalCluster):
    """Counts writes, and fails as told."""

    written = 0
    readable = True
    services_fail = False

    @override
    async def policies(self) -> list[RawObject] | None:  # type: ignore[override]  # as a real cluster does
        return list(await super().policies()) if self.readable else None

    @override
    async def services(self) -> list[RawObject]:
        if self.services_fail:
            raise Retry("no API server")
        return list(await super().services())

    @override
    async def write_policy_status(self, name: str, uid: str, status: PolicyStatus) -> None:
        self.written += 1
        await super().write_policy_status(name, uid, status)


class Rig:
    def __init__(self) -> None:
        self.told: list[ObjectRef] = []
        self.cluster = WatchedCluster(
            lambda: datetime(2030, 1, 1, tzinfo=UTC), lambda _: None, lambda *_: None, lambda: None
        )
        for name in ("chat", "other"):
            made = service_object()
            made["metadata"] = {"name": name, "labels": {"app": name}}
            self.cluster.put(made)
        self.policies = self.another()

    def another(self) -> PolicyReconciler:
        return PolicyReconciler(self.cluster, lambda: datetime(2030, 1, 1, tzinfo=UTC), Timing(), self.told.append)

    def put(self, name: str = "gold", **spec: Any) -> None:
        manifest = policy_object(name, **{"selector": {"matchLabels": {"app": "chat"}}, **spec})
        manifest["metadata"] = {"name": name}
        self.cluster.put(manifest)

    async def look(self) -> list[ObjectRef]:
        """Who is told of other targets."""
        self.told.clear()
        assert await self.policies.reconcile() == Timing().recheck_s
        return sorted(self.told)

    async def stored(self) -> list[RawObject]:
        return list(await self.cluster.policies() or ())

    async def status(self, name: str = "gold") -> dict[str, Any]:
        [found] = [each for each in await self.cluster.policies() or () if each["metadata"]["name"] == name]
        status: dict[str, Any] = found.get("status", {})
        return status


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_those_whose_targets_change_are_told_and_no_others(rig: Rig) -> None:
    assert await rig.look() == []
    rig.put(overrides=tpot("20ms"))
    assert await rig.look() == [CHAT]
    assert (await rig.status())["matched"] == 1
    assert await rig.look() == []
    # Of the same value as the spec's, from another place: the status of the service says from where.
    rig.put(overrides=tpot("50ms"))
    assert await rig.look() == [CHAT]
    rig.put(overrides=tpot("50ms"), selector={})
    assert await rig.look() == [OTHER]
    rig.cluster.delete(ObjectRef("", "gold"), POLICY_KIND)
    assert await rig.look() == [CHAT, OTHER]
    assert rig.policies.current.policies == ()


async def test_a_dry_run_touches_no_service(rig: Rig) -> None:
    before = await rig.cluster.services()
    rig.put(mode="DryRun", overrides=tpot("20ms"))
    assert await rig.look() == []
    assert (await rig.status())["changed"] == 1
    assert await rig.cluster.services() == before


async def test_looking_again_writes_nothing(rig: Rig) -> None:
    rig.put(overrides=tpot("20ms"))
    rig.put("silver", mode="DryRun", overrides=tpot("30ms"))
    await rig.look()
    assert rig.cluster.written == 2
    await rig.look()
    assert rig.cluster.written == 2
    assert (await rig.status())["observedGeneration"] == 1


async def test_after_a_restart_what_holds_is_known_before_anything_is_told(rig: Rig) -> None:
    rig.put(overrides=tpot("20ms"))
    rig.policies = rig.another()
    await rig.policies.start()
    assert [each.name for each in rig.policies.current.policies] == ["gold"]
    assert await rig.look() == []


async def test_a_look_that_fails_halfway_is_made_up_for(rig: Rig) -> None:
    rig.put(overrides=tpot("20ms"))
    rig.cluster.services_fail = True
    with pytest.raises(Retry):
        await rig.look()
    rig.cluster.services_fail = False
    assert await rig.look() == [CHAT]


async def test_a_right_that_is_lost_takes_no_policy_away(rig: Rig) -> None:
    rig.put(overrides=tpot("20ms"))
    await rig.look()
    rig.cluster.readable = False
    assert await rig.look() == []
    assert [each.name for each in rig.policies.current.policies] == ["gold"]


async def test_without_the_kind_there_are_no_policies(rig: Rig) -> None:
    rig.cluster.readable = False
    await rig.policies.start()
    assert await rig.look() == []
    assert rig.policies.current.policies == ()


async def test_a_service_being_deleted_is_not_counted(rig: Rig) -> None:
    rig.put(overrides=tpot("20ms"), selector={})
    rig.cluster.delete(OTHER, KIND)
    await rig.look()
    assert [each["name"] for each in (await rig.status())["services"]] == ["chat"]


async def test_a_status_that_comes_back_as_an_event_is_known_and_another_spec_is_not(rig: Rig) -> None:
    rig.put(overrides=tpot("20ms"))
    [stored] = await rig.stored()
    assert not rig.policies.knows(stored)
    await rig.look()
    [written] = await rig.stored()
    assert written["status"]["matched"] == 1
    assert rig.policies.knows(written)
    assert not rig.policies.knows({**written, "metadata": {**written["metadata"], "uid": "another"}})
    rig.put(overrides=tpot("30ms"))
    [changed] = await rig.stored()
    assert not rig.policies.knows(changed)
