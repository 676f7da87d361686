"""Policies on a local cluster: who is told, and what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from typing_extensions import override

from tidelane.engine.workload import Sketch
from tidelane.operator.crd import KIND, POLICY_KIND
from tidelane.operator.errors import Retry
from tidelane.operator.forecasts import Answer, Forecast, Forecasts, Question, Traffic
from tidelane.operator.local_cluster import LocalCluster
from tidelane.operator.observation import Timing
from tidelane.operator.policies import Labels, PolicyStatus
from tidelane.operator.policy_reconcile import PolicyReconciler
from tidelane.operator.resources import ObjectRef, RawObject, Service, Status, effective_status
from tidelane.rpc.wire import Workload

from .policy_objects import policy_object, tpot
from .world import service_object

CHAT, OTHER = ObjectRef("default", "chat"), ObjectRef("default", "other")


class WatchedCluster(LocalCluster):
    """Counts writes, and fails as told."""

    written = 0
    readable = True
    namespaces_readable = True
    services_fail = False

    @override
    async def policies(self) -> list[RawObject] | None:  # type: ignore[override]  # as a real cluster does
        return list(await super().policies()) if self.readable else None

    @override
    async def namespaces(self) -> dict[str, Labels] | None:  # type: ignore[override]  # as a real cluster does
        return {"default": {"env": "prod"}} if self.namespaces_readable else None

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
        self.traffic: dict[ObjectRef, Traffic] = {}
        self.asked: list[Question] = []
        self.simulated = asyncio.Event()
        self.forecasts = Forecasts(self._ask, self.simulated.set)
        self.cluster = WatchedCluster(
            lambda: datetime(2030, 1, 1, tzinfo=UTC), lambda _: None, lambda *_: None, lambda: None
        )
        for name in ("chat", "other"):
            made = service_object()
            made["metadata"] = {"name": name, "labels": {"app": name}}
            self.cluster.put(made)
        self.policies = self.another()

    async def _ask(self, question: Question) -> Answer:
        self.asked.append(question)
        return Forecast(60 if question.objective.slo.tpot_s < 0.05 else 99, 0.25, question.objective.slo.tpot_s, 2)

    def another(self) -> PolicyReconciler:
        return PolicyReconciler(
            self.cluster,
            lambda: datetime(2030, 1, 1, tzinfo=UTC),
            Timing(),
            self.told.append,
            lambda: self.traffic,
            self.forecasts,
        )

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


async def test_what_is_tried_is_simulated_and_what_is_steady_is_not_simulated_again(rig: Rig) -> None:
    rig.traffic = {CHAT: Traffic(Workload(Sketch(60.0, 120, gaps=119, gaps_s=60.0, gaps_squared_s2=60.0)), 1)}
    rig.put(mode="DryRun", overrides=tpot("20ms"))
    await rig.look()
    [entry] = (await rig.status())["services"]
    assert (entry["basis"], entry["verdict"]) == ("None", "Unknown")
    assert entry["message"] == "no requests measured yet; not simulated: under way"
    async with asyncio.timeout(5):
        await rig.simulated.wait()
    await rig.look()
    [entry] = (await rig.status())["services"]
    assert (entry["basis"], entry["verdict"]) == ("Simulated", "WouldBreach")
    assert entry["simulated"] == {"attainment": 60, "ttft": "250ms", "tpot": "20ms", "replicas": 2}
    assert sorted(each.objective.slo.tpot_s for each in rig.asked) == [0.02, 0.05]
    written = rig.cluster.written
    for _ in range(3):
        await rig.look()
    assert (len(rig.asked), rig.cluster.written) == (2, written)


async def test_what_is_enforced_is_measured_and_not_simulated(rig: Rig) -> None:
    rig.traffic = {CHAT: Traffic(Workload(Sketch(60.0, 120)), 1)}
    rig.put(overrides=tpot("20ms"))
    await rig.look()
    await asyncio.sleep(0)
    assert rig.asked == []
    [entry] = (await rig.status())["services"]
    assert (entry["basis"], "simulated" in entry) == ("None", False)


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


async def held(rig: Rig) -> Mapping[str, str]:
    """What is in force for chat, and from where, as its status would say it; its status does from now on."""
    [raw] = [each for each in await rig.cluster.services() if each["metadata"]["name"] == "chat"]
    service = rig.policies.current.applied(Service.parse(raw))
    assert not isinstance(service.spec, str)
    await rig.cluster.write_status(
        CHAT, raw["metadata"]["uid"], cast("Status", effective_status(service.spec.effective))
    )
    of = service.spec.effective
    return {name: f"{value} by {of.sources[name]}" for name, value in of.targets.shown().items()}


async def test_what_policies_gave_holds_on_through_a_restart_without_the_right_to_them(rig: Rig) -> None:
    rig.put(defaults={"slo": {"percentile": 90}}, overrides={**tpot("20ms"), "execution": {"minDecodeShare": 30}})
    await rig.look()
    before = await held(rig)
    assert before["tpot"] == "20ms by SLOPolicy gold (overrides)"
    assert before["minDecodeShare"] == "30 by SLOPolicy gold (overrides)"
    rig.cluster.readable = False
    rig.policies = rig.another()
    await rig.policies.start()
    assert await rig.look() == []
    assert await held(rig) == before
    # Deleted meanwhile: known once policies can be read again.
    rig.cluster.delete(ObjectRef("", "gold"), POLICY_KIND)
    assert await rig.look() == []
    rig.cluster.readable = True
    assert await rig.look() == [CHAT]
    assert (await held(rig))["tpot"] == "50ms by spec"


async def test_labels_of_namespaces_that_can_no_longer_be_read_hold_on(rig: Rig) -> None:
    rig.put(selector={"namespaceSelector": {"matchLabels": {"env": "prod"}}}, overrides=tpot("20ms"))
    assert await rig.look() == [CHAT, OTHER]
    assert (rig.policies.may_miss("default"), rig.policies.may_miss("new")) == (False, True)
    rig.cluster.namespaces_readable = False
    assert await rig.look() == []
    # Not to be looked for at each change of an object.
    assert not rig.policies.may_miss("new")
