"""Whatever happens in whatever order, the plan converges, and no replica ever has two owners."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidelane.operator.observation import Measured, Phase, TtftParts
from tidelane.operator.plan import ApplyChild, StartReplica, WriteStatus

from .policy_objects import policies, policy, tpot
from .world import TIMING, FakeNode, World, service_object

NODES = ("a", "b", "c")
node_names = st.sampled_from(NODES)


class PlanMachine(RuleBasedStateMachine):
    """Faults, edits and time around one service; after each, planning and acting to the end."""

    @initialize(replicas=st.integers(0, 4), devices=st.lists(st.integers(1, 3), min_size=3, max_size=3))
    def begin(self, replicas: int, devices: list[int]) -> None:
        nodes = [FakeNode(name, count) for name, count in zip(NODES, devices, strict=True)]
        self.world = World(service_object(replicas=replicas), *nodes)
        self.deleted, self.made = False, 1
        self.settle()

    def settle(self) -> None:
        owners = dict(self.world.service.placements) if self.world.service else {}
        for action in self.world.settle(rounds=30):
            if isinstance(action, WriteStatus):
                owners = {each["replica"]: each["node"] for each in action.status.get("placements", ())}
            if isinstance(action, StartReplica):
                assert owners.get(action.spec.ref.index) == action.node, "an agent was asked before it was on record"
            assert not (self.deleted and isinstance(action, StartReplica | ApplyChild)), "created while being deleted"

    @rule(replicas=st.integers(0, 4), gpus=st.integers(1, 3))
    def edit(self, replicas: int, gpus: int) -> None:
        if self.world.raw and not self.deleted:
            self.world.edit(replicas=replicas, scaling=None, resources={"gpus": gpus})
            self.settle()

    @rule(model=st.sampled_from(["file:///one", "file:///two"]))
    def another_model(self, model: str) -> None:
        if self.world.raw and not self.deleted:
            self.world.edit(model={"source": model})
            self.settle()

    @rule(bounds=st.sampled_from([(1, 2), (2, 4), None]), replicas=st.integers(0, 4))
    def scale_by_load_or_not(self, bounds: tuple[int, int] | None, replicas: int) -> None:
        if self.world.raw and not self.deleted:
            by_load = {"min": bounds[0], "max": bounds[1]} if bounds else None
            self.world.edit(scaling=by_load, replicas=None if by_load else replicas)
            self.settle()

    @rule(late=st.booleans(), queue_p90_s=st.sampled_from([0.0, 0.06, 0.3]))
    def load_changes(self, late: bool, queue_p90_s: float) -> None:
        parts = TtftParts(queue_p90_s, 0.05, queue_p90_s, 0.04)
        share = 0.5 if late else 1.0
        measured = Measured(50, queue_p90_s + 0.05, 0.04, share, 1.0, window_s=60.0, parts=parts)
        for node in self.world.nodes.values():
            for ref in node.replicas:
                self.world.update(node.name, ref, measured=measured)
        self.settle()

    @rule(tightest=st.sampled_from(["20ms", "80ms", None]))
    def a_policy_comes_or_goes(self, tightest: str | None) -> None:
        self.world.policies = policies(policy(overrides=tpot(tightest))) if tightest else policies()
        self.settle()

    @rule(name=node_names, seconds=st.sampled_from([TIMING.unreachable_s, TIMING.move_s]))
    def node_is_away(self, name: str, seconds: float) -> None:
        self.node_vanishes(name)
        self.time_passes(seconds)
        self.node_returns(name)

    @rule(name=node_names)
    def node_vanishes(self, name: str) -> None:
        self.world.lose(name)
        self.settle()

    @rule(name=node_names)
    def node_returns(self, name: str) -> None:
        self.world.find(name)
        self.settle()

    @rule(name=node_names)
    def node_restarts_empty(self, name: str) -> None:
        node = self.world.nodes[name]
        node.replicas.clear()
        node.claims.clear()
        self.settle()

    @rule(name=node_names, accepts=st.booleans())
    def cordon(self, name: str, accepts: bool) -> None:
        self.world.nodes[name].accepts = accepts
        self.settle()

    @rule(name=node_names, full=st.booleans())
    def memory_runs_out(self, name: str, full: bool) -> None:
        self.world.nodes[name].full = full
        self.settle()

    @rule(seconds=st.sampled_from([1.0, TIMING.unreachable_s, TIMING.move_s, TIMING.stabilisation_s]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.refusals.clear()
        self.settle()

    @rule()
    def engines_get_ready(self) -> None:
        self.world.serve()
        self.settle()

    @rule(name=node_names, phase=st.sampled_from([Phase.BACKING_OFF, Phase.FAILED, Phase.STARTING]))
    def engines_fail(self, name: str, phase: Phase) -> None:
        for ref, replica in list(self.world.nodes[name].replicas.items()):
            if replica.phase is not Phase.DRAINING:
                self.world.update(name, ref, phase=phase)
        self.settle()

    @rule()
    def status_is_lost(self) -> None:
        if self.world.raw:
            self.world.raw.pop("status", None)
            self.settle()

    @rule()
    def delete(self) -> None:
        if self.world.raw:
            self.world.delete()
            self.deleted = True
            self.settle()

    @precondition(lambda self: self.deleted)
    @rule()
    def deletion_ends(self) -> None:
        for name in NODES:
            self.world.find(name)
        self.settle()
        self.world.serve()
        self.settle()
        assert self.world.raw is None
        assert not self.world.children
        assert not any(node.replicas for node in self.world.nodes.values())

    @precondition(lambda self: self.deleted)
    @rule(replicas=st.integers(0, 4))
    def make_again(self, replicas: int) -> None:
        """Under the same name, though replicas of the former one may still be about."""
        if self.world.raw is None:
            self.made += 1
            self.world.raw = service_object(replicas=replicas)
            self.world.raw["metadata"]["uid"] = f"uid-{self.made}"
            self.deleted = False
            self.settle()

    @invariant()
    def nothing_is_left_to_do(self) -> None:
        if hasattr(self, "world"):
            assert self.world.plan().actions == ()

    @invariant()
    def no_replica_runs_twice_where_it_can_be_helped(self) -> None:
        if hasattr(self, "world"):
            running = Counter(
                ref
                for node in self.world.nodes.values()
                if node.lost_at_s is None
                for ref, replica in node.replicas.items()
                if replica.phase is not Phase.DRAINING
            )
            assert all(count == 1 for count in running.values()), running

    @invariant()
    def engines_in_reach_are_held_to_what_is_in_force(self) -> None:
        """But where the service was not understood, or its agent has refused this generation."""
        service = self.world.service if hasattr(self, "world") else None
        if service is None or service.deleting or isinstance(service.spec, str):
            return
        for node in self.world.nodes.values():
            for ref, replica in node.replicas.items():
                current = replica.generation == service.generation and service.placements.get(ref.index) == node.name
                told = node.lost_at_s is None and (node.name, ref) not in self.world.refusals
                if current and told and ref.service_uid == service.uid and replica.phase is not Phase.DRAINING:
                    assert replica.objective == service.spec.objective

    @invariant()
    def as_many_are_wanted_as_the_bounds_allow(self) -> None:
        service = self.world.service if hasattr(self, "world") else None
        if service is None or service.deleting or isinstance(service.spec, str) or service.spec.scaling is None:
            return
        # Until a new generation serves, the status speaks of the old one.
        if service.status["observedGeneration"] == service.generation:
            bounds, shown = service.spec.scaling, service.status["scaling"]
            assert bounds.min <= shown["replicas"] <= bounds.max
            assert all(index < shown["replicas"] for index in service.placements.keys() - {service.status.get("surge")})
            assert len(service.placements) <= shown["replicas"] + 1

    @invariant()
    def no_device_is_given_twice(self) -> None:
        if hasattr(self, "world"):
            assert all(node.free >= 0 for node in self.world.nodes.values())


TestPlanMachine = pytest.mark.slow(PlanMachine.TestCase)
TestPlanMachine.settings = settings(max_examples=150, stateful_step_count=30)
