"""One service, planned for case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidelane.operator.observation import KVPressure, Measured, Phase, Reach, Replica, TtftParts
from tidelane.operator.plan import ApplyChild, StartReplica, StopReplica, WriteStatus
from tidelane.operator.reports import Report
from tidelane.operator.resources import FINALIZER
from tidelane.rpc.wire import ReplicaRef

from .policy_objects import policies, policy, tpot
from .world import TIMING, FakeNode, World, service_object


@pytest.fixture
def world() -> World:
    return World(service_object(), FakeNode("a"), FakeNode("b"))


def serving(world: World) -> World:
    world.settle()
    world.serve()
    world.settle()
    return world


def ref(world: World, index: int = 0) -> ReplicaRef:
    service = world.service
    assert service
    return service.replica_ref(index)


class TestComingUp:
    def test_owner_is_recorded_before_its_agent_hears_of_it(self, world: World) -> None:
        kinds = [type(action).__name__ for action in world.plan().actions]
        assert kinds.index("SetFinalizers") < kinds.index("WriteStatus") < kinds.index("StartReplica")

    def test_status_while_the_model_loads(self, world: World) -> None:
        world.settle()
        assert world.condition("Ready") == ("False", "LoadingModel")
        assert world.condition("Scheduled") == ("True", "Placed")
        assert world.condition("ModelLoaded") == ("False", "NotLoaded")
        assert world.condition("Reconciling") == ("True", "LoadingModel")
        assert not world.has_condition("Stalled")
        assert "endpoint" not in world.status

    def test_serving(self, world: World) -> None:
        serving(world)
        assert world.condition("Ready") == ("True", "Serving")
        assert not world.has_condition("Reconciling")
        assert world.status["endpoint"] == "http://10.0.0.1:8000/v1"
        assert world.status["observedGeneration"] == 1
        assert set(world.children) == {("Service", "chat"), ("EndpointSlice", "chat-0")}
        [slice_] = [child for (kind, _), child in world.children.items() if kind == "EndpointSlice"]
        assert slice_["endpoints"][0]["addresses"] == ["10.0.0.1"]
        assert slice_["ports"][0]["port"] == 8000
        assert world.raw
        assert world.raw["metadata"]["finalizers"] == [FINALIZER]

    def test_replicas_are_spread(self, world: World) -> None:
        world.edit(replicas=2)
        serving(world)
        assert {each["node"] for each in world.status["placements"]} == {"a", "b"}

    def test_no_room_names_the_field(self, world: World) -> None:
        world.edit(resources={"gpus": 8})
        world.settle()
        assert world.condition("Scheduled") == ("False", "NoRoom")
        [scheduled] = [each for each in world.status["conditions"] if each["type"] == "Scheduled"]
        assert scheduled["message"] == "replica 0: spec.resources.gpus: 8 wanted; no node has more than 1"

    def test_room_promised_to_another_service_is_not_given_away(self, world: World) -> None:
        world.promised = {"a": (1,), "b": (1,)}
        world.settle()
        assert world.condition("Scheduled") == ("False", "NoRoom")

    def test_what_is_free_and_who_holds_the_rest_is_told(self, world: World) -> None:
        del world.nodes["b"]
        held = world.nodes["a"]
        for name in ("one", "two"):
            ref = ReplicaRef("default", name, f"uid-of-{name}", 0)
            held.replicas[ref] = Replica(ref, 1, 1, Phase.READY)
            held.claims[ref] = 1
        held.devices = 3
        world.edit(resources={"gpus": 2})
        world.settle()
        [scheduled] = [each for each in world.status["conditions"] if each["type"] == "Scheduled"]
        assert scheduled["message"] == (
            "replica 0: spec.resources.gpus: 2 wanted; no node has as many free: "
            "a has 1 of 3, the rest held by default/one, default/two"
        )

    def test_an_agent_that_refuses_is_left_for_another(self, world: World) -> None:
        world.nodes["a"].full = True
        serving(world)
        assert world.status["placements"] == [{"replica": 0, "node": "b"}]

    def test_when_all_refuse_the_reason_is_told_and_it_is_tried_again(self, world: World) -> None:
        world.nodes["a"].full = world.nodes["b"].full = True
        world.settle()
        assert world.condition("Scheduled") == ("False", "NoRoom")
        [scheduled] = [each for each in world.status["conditions"] if each["type"] == "Scheduled"]
        assert "1 devices wanted" in scheduled["message"]
        assert world.plan().again_in_s == TIMING.refusal_s
        world.refusals.clear()
        world.nodes["b"].full = False
        serving(world)
        assert world.condition("Ready") == ("True", "Serving")

    def test_a_loopback_address_is_not_published_and_said(self, world: World) -> None:
        world.settle()
        world.serve()
        node = world.nodes["a"]
        node.replicas = {key: replace(each, host="127.0.0.1") for key, each in node.replicas.items()}
        world.settle()
        assert world.condition("Ready") == ("True", "Serving")
        assert world.status["endpoint"] == "http://127.0.0.1:8000/v1"
        assert set(world.children) == {("Service", "chat")}
        assert "AddressNotPublished" in [report.reason for report in world.reports]

    def test_a_foreign_service_of_that_name_is_left_alone(self, world: World) -> None:
        foreign = {"kind": "Service", "metadata": {"name": "chat", "namespace": "default", "uid": "x"}, "spec": {}}
        world.children["Service", "chat"] = foreign
        serving(world)
        world.delete()
        world.settle()
        assert world.children["Service", "chat"] == foreign
        assert "ServiceNameTaken" in [report.reason for report in world.reports]

    def test_children_that_were_tampered_with_are_mended(self, world: World) -> None:
        serving(world)
        world.children["Service", "chat"]["spec"]["ports"][0]["port"] = 81
        assert [type(action) for action in world.plan().actions] == [ApplyChild]


class TestChangingTheSpec:
    def test_a_new_slo_reaches_the_agent_and_ready_does_not_blink(self, world: World) -> None:
        serving(world)
        world.edit(slo={"ttft": "200ms", "tpot": "40ms", "percentile": 90})
        actions = world.plan().actions
        assert [type(action) for action in actions] == [StartReplica]
        assert isinstance(actions[0], StartReplica)
        assert actions[0].spec.objective.slo.tpot_s == 0.04
        world.settle()
        assert world.condition("Ready") == ("True", "Serving")
        assert world.status["observedGeneration"] == 1
        world.serve()
        world.settle()
        assert world.condition("Ready") == ("True", "Serving")
        assert world.status["observedGeneration"] == 2
        assert world.status["effectiveSLO"]["tpot"] == "40ms"

    def test_fewer_replicas(self, world: World) -> None:
        world.edit(replicas=2)
        serving(world)
        world.edit(replicas=1)
        done = world.settle()
        [stop] = [action for action in done if isinstance(action, StopReplica)]
        assert stop.ref.index == 1
        assert ("EndpointSlice", "chat-1") not in world.children

    def test_none(self, world: World) -> None:
        serving(world)
        world.edit(replicas=0)
        serving(world)
        assert world.condition("Ready") == ("True", "ScaledToZero")
        assert not world.nodes["a"].replicas

    def test_what_has_no_effect_yet_is_said(self, world: World) -> None:
        for kv_cache in ({"prefetch": True, "dtype": "auto"}, {"dtype": "int8"}):
            world.edit(kvCache=kv_cache)
            for _ in range(3):  # one more replica, the one, and the one more away
                serving(world)
            assert world.condition("Ready") == ("True", "Serving")
            assert world.condition("FieldsIgnored") == ("True", "NotSupportedYet")

    def test_where_no_kv_is_kept_for_later_prompts_all_that_would_steer_it_is_said_to_have_no_effect(
        self, world: World
    ) -> None:
        wanted = {"hostMemory": "8Gi", "nvme": "64Gi", "dtype": "int8", "idleTimeout": "5m", "prefetch": True}
        world.edit(execution={"mode": "Disaggregated"}, kvCache=wanted)
        serving(world)
        [message] = [each["message"] for each in world.status["conditions"] if each["type"] == "FieldsIgnored"]
        for name in wanted:
            assert f"spec.kvCache.{name} (Disaggregated keeps no KV for later prompts)" in message

    @pytest.mark.parametrize(
        ("mode", "moves"),
        [
            ("Lanes", True),
            ("Auto", True),
            ("MixedBatch", False),
            ("ChunkedPrefill", False),
            ("StaticLanes", False),
            ("Disaggregated", False),
        ],
    )
    def test_bounds_on_a_border_that_does_not_move_are_said_to_have_no_effect(
        self, world: World, mode: str, moves: bool
    ) -> None:
        world.edit(execution={"mode": mode, "minDecodeShare": 20, "maxDecodeShare": 60})
        serving(world)
        ignored = [each["message"] for each in world.status["conditions"] if each["type"] == "FieldsIgnored"]
        assert bool(ignored) is not moves
        for field in () if moves else ("spec.execution.minDecodeShare", "spec.execution.maxDecodeShare"):
            assert field in ignored[0]

    @pytest.mark.parametrize(("mode", "ignored"), [("Lanes", False), ("MixedBatch", False), ("Disaggregated", True)])
    @pytest.mark.parametrize("kept", [{"hostMemory": "1Gi"}, {"nvme": "1Gi"}, {"idleTimeout": "5m"}])
    def test_kv_for_later_prompts_has_no_effect_in_one_mode(
        self, world: World, mode: str, ignored: bool, kept: dict[str, str]
    ) -> None:
        world.edit(execution={"mode": mode}, kvCache=kept)
        serving(world)
        assert world.has_condition("FieldsIgnored") is ignored

    def test_late_requests_are_refused_only_where_prompts_have_deadlines(self, world: World) -> None:
        world.edit(execution={"mode": "Lanes", "lateRequests": "Refuse"})
        serving(world)
        assert not world.has_condition("FieldsIgnored")
        world.edit(execution={"mode": "MixedBatch", "lateRequests": "Refuse"})
        serving(world)
        assert world.condition("FieldsIgnored") == ("True", "NotSupportedYet")

    def test_a_spec_from_older_rules_is_reported_and_can_be_deleted(self, world: World) -> None:
        serving(world)
        world.edit(slo={"ttft": "fast", "tpot": "50ms"})
        world.settle()
        assert world.condition("Stalled") == ("True", "InvalidSpec")
        world.delete()
        world.settle()
        world.serve()
        world.settle()
        assert world.raw is None


class TestPolicies:
    def test_another_target_reaches_the_agent_and_nothing_else_happens(self, world: World) -> None:
        serving(world)
        writes, children = world.status_writes, dict(world.children)
        world.policies = policies(policy(overrides=tpot("20ms")))
        [action] = world.settle()
        assert isinstance(action, StartReplica)
        assert (action.spec.generation, action.spec.objective.slo.tpot_s) == (1, 0.02)
        # Until the engine is held to it, the status speaks of what it is held to.
        assert world.status["effectiveSLO"]["tpot"] == "50ms"
        assert world.status_writes == writes
        world.serve()
        world.settle()
        [told] = [report.message for report in world.reports if report.reason == "TargetsChanged"]
        assert told == "tpot 50ms to 20ms (SLOPolicy gold (overrides))"
        shown = world.status["effectiveSLO"]
        assert (shown["tpot"], shown["ttft"]) == ("20ms", "200ms")
        assert shown["source"] == "spec, SLOPolicy gold (overrides)"
        assert {each["field"]: each["source"] for each in shown["sources"]} == {
            "ttft": "spec",
            "tpot": "SLOPolicy gold (overrides)",
            "percentile": "spec",
        }
        assert world.condition("Ready") == ("True", "Serving")
        assert world.children == children

    def test_it_reverts_when_the_policy_goes(self, world: World) -> None:
        world.policies = policies(policy(overrides={"execution": {"minDecodeShare": 40}}))
        serving(world)
        assert world.status["effectiveExecution"] == {"minDecodeShare": 40}
        world.policies = policies()
        serving(world)
        told = [report.message for report in world.reports if report.reason == "TargetsChanged"]
        assert told == ["minDecodeShare 40 to none"]
        assert "effectiveExecution" not in world.status
        assert world.status["effectiveSLO"]["source"] == "spec"
        [replica] = world.nodes["a"].replicas.values()
        assert replica.objective
        assert replica.objective.bounds is None

    def test_an_agent_that_knows_only_generations_is_not_asked_again_and_again(self, world: World) -> None:
        serving(world)
        world.update("a", ref(world), objective=None)
        world.policies = policies(policy(overrides=tpot("20ms")))
        assert [type(action) for action in world.settle()] == [WriteStatus, Report]

    def test_what_is_left_out_is_shown_as_built_in(self) -> None:
        world = World(service_object(slo=None), FakeNode("a"))
        serving(world)
        shown = world.status["effectiveSLO"]
        assert (shown["ttft"], shown["tpot"], shown["percentile"], shown["source"]) == ("1s", "100ms", 99, "built in")
        assert "ttftPer1kInputTokens" not in shown


class TestTrouble:
    def test_an_engine_that_restarts(self, world: World) -> None:
        serving(world)
        world.update("a", ref(world), phase=Phase.BACKING_OFF, message="killed by signal 9")
        world.settle()
        assert world.condition("Ready") == ("False", "EngineRestarting")
        assert ("EndpointSlice", "chat-0") not in world.children
        world.serve()
        world.settle()
        assert world.condition("Ready") == ("True", "Serving")
        assert ("EndpointSlice", "chat-0") in world.children

    def test_an_engine_that_can_never_run_stalls(self, world: World) -> None:
        world.settle()
        world.update("a", ref(world), phase=Phase.FAILED, message="no such model")
        world.settle()
        assert world.condition("Stalled") == ("True", "EngineFailed")
        assert not world.has_condition("Reconciling")

    def test_an_agent_that_is_away_for_a_moment_changes_nothing(self, world: World) -> None:
        serving(world)
        world.lose("a")
        world.now_s += TIMING.unreachable_s - 1
        made = world.plan()
        assert made.actions == ()
        assert made.again_in_s == pytest.approx(1)

    def test_a_node_that_vanished_is_not_ready_then_replaced(self, world: World) -> None:
        serving(world)
        world.lose("a")
        world.now_s += TIMING.unreachable_s
        world.settle()
        assert world.condition("Ready") == ("False", "NodeLost")
        assert world.status["placements"] == [{"replica": 0, "node": "a"}]
        world.now_s += TIMING.move_s
        done = world.settle()
        assert [action.node for action in done if isinstance(action, StartReplica)] == ["b"]
        assert world.status["placements"] == [{"replica": 0, "node": "b"}]
        assert "Moved" in [report.reason for report in world.reports]

    def test_a_node_that_returns_after_its_replica_moved_must_let_go(self, world: World) -> None:
        serving(world)
        world.lose("a")
        world.now_s += TIMING.move_s + 1
        world.settle()
        world.find("a")
        done = world.settle()
        assert [action.node for action in done if isinstance(action, StopReplica)] == ["a"]

    def test_without_another_node_the_owner_stays_on_record(self) -> None:
        world = serving(World(service_object(), FakeNode("a")))
        world.lose("a")
        world.now_s += TIMING.move_s + 1
        world.settle()
        assert world.status["placements"] == [{"replica": 0, "node": "a"}]
        world.find("a")
        world.settle()
        assert world.condition("Ready") == ("True", "Serving")

    def test_a_cordoned_node_keeps_what_it_runs(self, world: World) -> None:
        serving(world)
        world.nodes["a"].accepts = False
        assert world.plan().actions == ()

    def test_an_agent_that_forgot_is_asked_again(self, world: World) -> None:
        serving(world)
        world.nodes["a"].replicas.clear()
        world.nodes["a"].claims.clear()
        done = world.settle()
        assert [action.node for action in done if isinstance(action, StartReplica)] == ["a"]

    def test_a_replica_without_record_is_adopted(self, world: World) -> None:
        serving(world)
        assert world.raw
        del world.raw["status"]
        done = world.settle()
        assert not [action for action in done if isinstance(action, StartReplica | StopReplica)]
        assert world.status["placements"] == [{"replica": 0, "node": "a"}]

    def test_after_an_operator_restart_nothing_moves_before_agents_are_heard(self, world: World) -> None:
        serving(world)
        nodes, world.nodes = world.nodes, {}
        world.now_s = 2.0
        made = world.plan()
        assert made.actions == ()
        assert made.again_in_s == pytest.approx(TIMING.unreachable_s - 2)
        world.nodes = nodes
        assert world.plan().actions == ()


class TestDeleting:
    def test_replicas_then_finalizer(self, world: World) -> None:
        serving(world)
        world.delete()
        done = world.settle()
        assert [action.node for action in done if isinstance(action, StopReplica)] == ["a"]
        assert world.raw
        assert world.raw["metadata"]["finalizers"] == [FINALIZER]
        assert world.condition("Ready") == ("False", "Deleting")
        assert not world.children
        world.serve()
        world.settle()
        assert world.raw is None

    def test_nothing_is_created(self, world: World) -> None:
        assert world.raw
        world.raw["metadata"]["finalizers"] = [FINALIZER]
        world.delete()
        done = world.settle()
        assert not [action for action in done if isinstance(action, StartReplica | ApplyChild)]
        assert world.raw is None

    def test_other_finalizers_stay(self, world: World) -> None:
        assert world.raw
        world.raw["metadata"]["finalizers"] = ["example.com/theirs"]
        serving(world)
        world.delete()
        world.settle()
        world.serve()
        world.settle()
        assert world.raw["metadata"]["finalizers"] == ["example.com/theirs"]

    def test_waits_for_an_agent_that_is_away_but_not_for_ever(self, world: World) -> None:
        serving(world)
        world.lose("a")
        world.delete()
        world.settle()
        assert not world.is_gone()
        world.now_s += TIMING.forget_s
        world.settle()
        assert world.is_gone()
        world.find("a")
        done = world.settle()
        assert [type(action) for action in done] == [StopReplica]

    def test_the_annotation_forces_it(self, world: World) -> None:
        serving(world)
        world.lose("a")
        world.delete()
        assert world.raw
        world.raw["metadata"]["annotations"] = {"tidelane.dev/force-delete": "true"}
        world.settle()
        assert world.raw is None

    def test_a_service_made_again_under_the_name_does_not_inherit_replicas(self, world: World) -> None:
        serving(world)
        world.raw = service_object()
        world.raw["metadata"]["uid"] = "uid-2"
        actions = world.plan().actions
        assert [action.ref.service_uid for action in actions if isinstance(action, StopReplica)] == ["uid-1"]


class TestFigures:
    def measure(self, world: World, **changes: Any) -> None:
        measured: dict[str, Any] = {
            "requests": 100,
            "ttft_s": 0.1234,
            "tpot_s": 0.0321,
            "attainment": 0.95,
            "goodput_rps": 3.14,
        }
        world.update("a", ref(world), measured=Measured(**{**measured, **changes}))

    def test_are_rounded(self, world: World) -> None:
        serving(world)
        world.now_s += TIMING.figures_s
        self.measure(world)
        world.settle()
        shown = {name: world.status[name] for name in ("ttft", "tpot", "attainment", "goodput")}
        assert shown == {"ttft": "120ms", "tpot": "32ms", "attainment": 95, "goodput": "3.1/s"}
        assert world.condition("SLOMet") == ("True", "Met")

    def test_ttft_is_told_by_its_parts(self, world: World) -> None:
        serving(world)
        world.now_s += TIMING.figures_s
        self.measure(world, parts=TtftParts(0.0312, 0.0987, 0.02, 0.05))
        world.settle()
        assert (world.status["ttftQueue"], world.status["ttftPrefill"]) == ("31ms", "99ms")
        # What is small beside TTFT as a whole is no news, however large a part of itself it is.
        writes = world.status_writes
        for queue_s in (0.02, 0.042, 0.031):
            world.now_s += TIMING.figures_s
            self.measure(world, parts=TtftParts(queue_s, 0.0987, 0.02, 0.05))
            world.settle()
        assert world.status_writes == writes
        world.now_s += TIMING.figures_s
        self.measure(world, parts=TtftParts(0.05, 0.0987, 0.02, 0.05))
        world.settle()
        assert world.status["ttftQueue"] == "50ms"

    def test_a_breach_is_told_and_ready_stays(self, world: World) -> None:
        serving(world)
        world.now_s += TIMING.figures_s
        self.measure(world, attainment=0.89)
        world.settle()
        assert world.condition("SLOMet") == ("False", "Missed")
        assert world.condition("Ready") == ("True", "Serving")
        assert "SLOMissed" in [report.reason for report in world.reports]

    def test_targets_out_of_reach_are_told_with_the_best_there_is(self, world: World) -> None:
        serving(world)

        def look(tpot_s: float, **changes: Any) -> tuple[str, str]:
            world.now_s += TIMING.figures_s
            self.measure(world, tpot_s=tpot_s, **changes)
            world.settle()
            return world.condition("SLOFeasible")

        assert not world.has_condition("SLOFeasible")
        world.update("a", ref(world), reach=Reach(100, ttft_s=0.05, tpot_s=0.04))
        assert look(0.06) == ("True", "WithinReach")
        # By prediction out of reach, but measured to be within it.
        world.update("a", ref(world), reach=Reach(100, ttft_s=0.05, tpot_s=0.0613))
        assert look(0.045) == ("True", "WithinReach")
        assert look(0.07) == ("False", "OutOfReach")
        [told] = [report for report in world.reports if report.reason == "SLOOutOfReach"]
        assert told.message.startswith(
            "TPOT 50ms wanted; 61ms is the best that replica 0 can give, alone on its device"
        )
        # Just about within reach again is no news, nor is another best.
        world.update("a", ref(world), reach=Reach(100, ttft_s=0.05, tpot_s=0.049))
        assert look(0.07) == ("False", "OutOfReach")
        [condition] = [each for each in world.status["conditions"] if each["type"] == "SLOFeasible"]
        assert condition["message"] == told.message
        world.update("a", ref(world), reach=Reach(100, ttft_s=0.05, tpot_s=0.047))
        assert look(0.07) == ("True", "WithinReach")
        world.update("a", ref(world), reach=None)
        assert look(0.07, requests=0) == ("Unknown", "NoRequests")
        assert world.condition("Ready") == ("True", "Serving")

    def test_long_prompts_are_judged_with_their_allowance(self, world: World) -> None:
        world.edit(slo={"ttft": "200ms", "ttftPer1kInputTokens": "100ms", "tpot": "50ms"})
        serving(world)
        for input_tokens, told in ((4000, ("True", "WithinReach")), (1000, ("False", "OutOfReach"))):
            world.now_s += TIMING.figures_s
            world.update("a", ref(world), reach=Reach(input_tokens, ttft_s=0.4, tpot_s=0.01))
            self.measure(world, ttft_s=0.9)
            world.settle()
            assert world.condition("SLOFeasible") == told
        [condition] = [each for each in world.status["conditions"] if each["type"] == "SLOFeasible"]
        assert condition["message"].startswith(
            "TTFT 200ms and 100ms for every 1,000 tokens wanted; 400ms is the best that replica 0 can give a prompt of "
            "1000 tokens"
        )

    def test_lack_of_room_is_told_as_it_begins_gets_worse_and_ends(self, world: World) -> None:
        serving(world)
        told = []
        for pressure in (None, KVPressure.NONE, KVPressure.WAITING, KVPressure.REFUSING, KVPressure.NONE):
            world.reports.clear()
            world.now_s += TIMING.figures_s
            world.update("a", ref(world), kv_pressure=pressure)
            world.settle()
            shown = world.condition("KVPressure") if world.has_condition("KVPressure") else None
            told.append((shown, [report.reason for report in world.reports]))
            assert world.condition("Ready") == ("True", "Serving")
        assert told == [
            (None, []),
            (("False", "EnoughRoom"), []),
            (("True", "WaitingForRoom"), ["KVPressure"]),
            (("True", "Refusing"), ["KVPressure"]),
            (("False", "EnoughRoom"), ["KVPressureOver"]),
        ]

    def test_are_written_at_most_once_in_ten_seconds(self, world: World) -> None:
        serving(world)
        world.now_s += TIMING.figures_s
        self.measure(world)
        world.settle()
        writes = world.status_writes
        world.now_s += 4
        self.measure(world, ttft_s=0.5)
        made = world.plan()
        assert made.actions == ()
        assert made.again_in_s == pytest.approx(TIMING.figures_s - 4)
        world.now_s += 6
        world.settle()
        assert world.status_writes == writes + 1
        assert world.status["ttft"] == "500ms"

    def test_noise_writes_nothing(self, world: World) -> None:
        serving(world)
        world.now_s += TIMING.figures_s
        self.measure(world)
        world.settle()
        for step in range(50):
            world.now_s += 60
            self.measure(world, ttft_s=0.12 + 0.01 * (step % 2), tpot_s=0.033, goodput_rps=3.2, attainment=0.955)
            assert world.plan().actions == ()

    def test_an_idle_service_keeps_its_last_figures(self, world: World) -> None:
        serving(world)
        world.now_s += TIMING.figures_s
        self.measure(world)
        world.settle()
        world.now_s += 60
        self.measure(world, requests=0, ttft_s=0, tpot_s=0, attainment=0, goodput_rps=0)
        world.settle()
        assert world.status["ttft"] == "120ms"
        assert world.status["goodput"] == "0/s"
        assert world.condition("SLOMet") == ("Unknown", "NoRequests")
        world.now_s += 3600
        assert world.plan().actions == ()

    def test_transition_times_move_only_when_the_status_flips(self, world: World) -> None:
        world.settle()
        [before] = [each for each in world.status["conditions"] if each["type"] == "Ready"]
        world.now_s += 5
        world.update("a", ref(world), model_loaded=True)
        world.settle()
        [warm] = [each for each in world.status["conditions"] if each["type"] == "Ready"]
        assert (warm["reason"], warm["lastTransitionTime"]) == ("WarmingUp", before["lastTransitionTime"])
        world.now_s += 5
        world.serve()
        world.settle()
        [ready] = [each for each in world.status["conditions"] if each["type"] == "Ready"]
        assert ready["lastTransitionTime"] > warm["lastTransitionTime"]

    def test_nothing_is_written_in_the_same_state_twice(self, world: World) -> None:
        serving(world)
        assert not [action for action in world.plan().actions if isinstance(action, WriteStatus)]


def test_without_agents_a_service_says_why_of_one() -> None:
    world = World(service_object())
    cases: list[tuple[dict[str, str], str]] = [
        ({}, "replica 0: no agent is connected"),
        ({"b:1": "refused"}, "replica 0: no agent is connected: b:1: refused"),
        ({"b:1": "refused", "a:1": "no route"}, "replica 0: no agent is connected: a:1: no route (and 1 more)"),
    ]
    for world.unreached, said in cases:
        world.settle()
        [scheduled] = [each for each in world.status["conditions"] if each["type"] == "Scheduled"]
        assert (scheduled["reason"], scheduled["message"]) == ("NoAgents", said)
