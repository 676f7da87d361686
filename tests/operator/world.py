"""A made-up world for the pure plan: nodes with agents that obey, one service, and no clock but ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tidelane.operator.children import is_owned
from tidelane.operator.observation import Device, Node, Observed, Phase, Refusal, RefusalKind, Replica, Timing
from tidelane.operator.plan import (
    Action,
    ApplyChild,
    DeleteChild,
    Plan,
    SetFinalizers,
    StartReplica,
    StopReplica,
    WriteStatus,
    plan,
)
from tidelane.operator.policies import Policies
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, Service
from tidelane.rpc.wire import ReplicaRef

REF = ObjectRef("default", "chat")
TIMING = Timing()


def service_object(**spec: Any) -> dict[str, Any]:
    wanted = {
        "model": {"source": "builtin://smollm2-135m-instruct"},
        "slo": {"ttft": "200ms", "tpot": "50ms", "percentile": 90},
        "replicas": 1,
        **spec,
    }
    return {
        "apiVersion": "tidelane.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "name": REF.name,
            "namespace": REF.namespace,
            "uid": "uid-1",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {name: value for name, value in wanted.items() if value is not None},
    }


@dataclass
class FakeNode:
    """An agent that refuses what it has no room for. `lost_at_s`: it cannot be reached, but its engines go on."""

    name: str
    devices: int = 1
    accepts: bool = True
    # It cannot take more than what it has, for a reason that the operator does not see, such as memory.
    full: bool = False
    lost_at_s: float | None = None
    replicas: dict[ReplicaRef, Replica] = field(default_factory=dict)
    claims: dict[ReplicaRef, int] = field(default_factory=dict)
    # What the operator last heard, while the agent cannot be reached.
    last_heard: Mapping[ReplicaRef, Replica] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.devices - sum(self.claims.values())

    def node(self, now_s: float) -> Node:
        held = self.devices - self.free
        devices = tuple(Device(f"{self.name}-{index}", held=int(index < held)) for index in range(self.devices))
        if self.lost_at_s is None:
            self.last_heard = dict(self.replicas)
        lost_s = None if self.lost_at_s is None else now_s - self.lost_at_s
        return Node(self.name, devices, dict(self.last_heard), self.accepts, lost_s)


class World:
    """Applies actions as the real parts would, at once."""

    def __init__(self, raw: dict[str, Any] | None, *nodes: FakeNode) -> None:
        self.raw = raw
        self.nodes = {node.name: node for node in nodes}
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        self.refusals: dict[tuple[str, ReplicaRef], Refusal] = {}
        self.reports: list[Report] = []
        self.now_s = 1000.0
        self.status_writes = 0
        self.promised: dict[str, tuple[int, ...]] = {}
        self.policies = Policies()
        self.calm_since: datetime | None = None
        self.unreached: dict[str, str] = {}

    @property
    def now(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now_s)

    @property
    def service(self) -> Service | None:
        return self.policies.applied(Service.parse(self.raw)) if self.raw else None

    def is_gone(self) -> bool:
        return self.raw is None

    @property
    def status(self) -> dict[str, Any]:
        assert self.raw is not None
        status: dict[str, Any] = self.raw.get("status", {})
        return status

    def condition(self, name: str) -> tuple[str, str]:
        """Status and reason."""
        [found] = [each for each in self.status["conditions"] if each["type"] == name]
        return found["status"], found["reason"]

    def has_condition(self, name: str) -> bool:
        return any(each["type"] == name for each in self.status["conditions"])

    def observed(self) -> Observed:
        return Observed(
            nodes={name: node.node(self.now_s) for name, node in self.nodes.items()},
            children=tuple(self.children.values()),
            refusals=self.refusals,
            watching_for_s=self.now_s,
            promised=self.promised,
            calm_since=self.calm_since,
            unreached=self.unreached,
        )

    def plan(self) -> Plan:
        made = plan(REF, self.service, self.observed(), self.now, TIMING)
        self.calm_since = made.calm_since
        return made

    def settle(self, rounds: int = 12) -> list[Action]:
        """Plans and acts until nothing is left to do; returns what was done."""
        done: list[Action] = []
        for _ in range(rounds):
            actions = self.plan().actions
            if not actions:
                return done
            for action in actions:
                self.act(action)
            done += actions
        raise AssertionError(f"still acting after {rounds} rounds: {actions}")

    def edit(self, **spec: Any) -> None:
        assert self.raw is not None
        wanted = {name: value for name, value in {**self.raw["spec"], **spec}.items() if value is not None}
        if wanted != self.raw["spec"]:
            self.raw["spec"] = wanted
            self.raw["metadata"]["generation"] += 1

    def delete(self) -> None:
        assert self.raw is not None
        self.raw["metadata"] |= {"deletionTimestamp": self.now.isoformat()}

    def lose(self, name: str) -> None:
        node = self.nodes[name]
        node.node(self.now_s)
        if node.lost_at_s is None:
            node.lost_at_s = self.now_s

    def find(self, name: str) -> None:
        self.nodes[name].lost_at_s = None

    def serve(self, *, drained: bool = True) -> None:
        """Every engine gets where it is going."""
        for node in self.nodes.values():
            for ref, replica in list(node.replicas.items()):
                if replica.phase is Phase.DRAINING and drained:
                    del node.replicas[ref], node.claims[ref]
                elif replica.phase is not Phase.DRAINING:
                    self.update(node.name, ref, phase=Phase.READY, model_loaded=True, serving=replica.generation)
                    self.update(node.name, ref, serves_objective=True)

    def update(self, name: str, ref: ReplicaRef, serving: int | None = None, **changes: Any) -> None:
        node = self.nodes[name]
        replica = replace(node.replicas[ref], host=f"10.0.0.{len(name)}", port=8000, **changes)
        node.replicas[ref] = replace(replica, serving_generation=serving) if serving else replica

    def act(self, action: Action) -> None:
        match action:
            case SetFinalizers(finalizers):
                assert self.raw is not None
                self.raw["metadata"]["finalizers"] = list(finalizers)
                if not finalizers and "deletionTimestamp" in self.raw["metadata"]:
                    self.raw = None
            case WriteStatus(status):
                assert self.raw is not None
                self.raw["status"] = copy.deepcopy(status)
                self.status_writes += 1
            case StartReplica(name, spec):
                self._start(name, spec)
            case StopReplica(name, ref):
                node = self.nodes[name]
                assert node.lost_at_s is None, f"{name} cannot be reached"
                node.replicas[ref] = replace(node.replicas[ref], phase=Phase.DRAINING)
            case ApplyChild(manifest):
                key = manifest["kind"], manifest["metadata"]["name"]
                child = copy.deepcopy(dict(manifest))
                child["metadata"]["uid"] = f"uid of {key}"
                assert key not in self.children or is_owned(
                    self.children[key], manifest["metadata"]["ownerReferences"][0]["uid"]
                )
                self.children[key] = child
            case DeleteChild(kind, ref):
                del self.children[kind, ref.name]
            case Report():
                self.reports.append(action)

    def _start(self, name: str, spec: Any) -> None:
        node = self.nodes[name]
        assert node.lost_at_s is None, f"{name} cannot be reached"
        known = node.replicas.get(spec.ref)
        room = node.free + node.claims.get(spec.ref, 0)
        if room < spec.devices or (known is None and (node.full or not node.accepts)):
            message = f"{spec.devices} devices wanted, {room} free"
            self.refusals[name, spec.ref] = Refusal(RefusalKind.NO_ROOM, spec.generation, message, 15.0)
            return
        node.claims[spec.ref] = spec.devices
        if known and known.phase is not Phase.DRAINING and (known.running is None or known.phase is not Phase.READY):
            node.replicas[spec.ref] = replace(
                known, generation=spec.generation, objective=spec.objective, serves_objective=False, running=spec
            )
        elif known and known.phase is not Phase.DRAINING and not spec.takes_another_engine(known.running):
            served = known.serves_objective and known.objective == spec.objective
            node.replicas[spec.ref] = replace(
                known, generation=spec.generation, objective=spec.objective, serves_objective=served
            )
        else:
            node.replicas[spec.ref] = Replica(
                spec.ref,
                spec.generation,
                None,
                Phase.STARTING,
                objective=spec.objective,
                serves_objective=False,
                running=spec,
            )
