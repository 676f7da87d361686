"""InferenceService: from what the API server holds to frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NotRequired, Self, TypedDict

from typing_extensions import override

from tidelane.engine.slo import Slo
from tidelane.operator.crd import CLUSTER_WIDE, GROUP
from tidelane.operator.quantities import parse_duration_s, parse_memory
from tidelane.operator.targets import BUILT_IN, SPEC, Effective, Layer, Targets, merge
from tidelane.rpc.wire import (
    ExecutionMode,
    KvCacheSpec,
    LateRequests,
    ModelSpec,
    Objective,
    ReplicaRef,
    ReplicaSpec,
)

# An object as the API server gives it, in JSON's types.
RawObject = Mapping[str, Any]

FINALIZER: Final = f"{GROUP}/replicas"
# Lets a deletion end although the agent that owns a replica cannot be reached.
FORCE_DELETE: Final = f"{GROUP}/force-delete"


class Condition(TypedDict):
    type: str
    status: str
    reason: str
    message: str
    observedGeneration: int
    lastTransitionTime: str


class Placement(TypedDict):
    replica: int
    node: str


class ScalingStatus(TypedDict):
    replicas: int
    reason: str
    changedAt: str


class Status(TypedDict, total=False):
    """`status` of an InferenceService; the CRD says what each field means."""

    observedGeneration: int
    conditions: Sequence[Condition]
    placements: Sequence[Placement]
    replicas: int
    readyReplicas: int
    endpoint: str
    effectiveSLO: Mapping[str, Any]
    effectiveExecution: Mapping[str, int]
    ttft: str
    tpot: str
    ttftMedian: str
    tpotMedian: str
    ttftQueue: str
    ttftPrefill: str
    attainment: int
    goodput: str
    lanes: Sequence[Mapping[str, Any]]
    measuredAt: str
    scaling: ScalingStatus
    surge: int


class _Spec(TypedDict):
    model: Mapping[str, Any]
    slo: NotRequired[Mapping[str, Any]]
    execution: NotRequired[Mapping[str, Any]]
    kvCache: NotRequired[Mapping[str, Any]]
    replicas: NotRequired[int]
    scaling: NotRequired[Mapping[str, int]]
    resources: NotRequired[Mapping[str, int]]


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    """Which object of its kind. `namespace` empty: the kind has none."""

    namespace: str
    name: str

    @classmethod
    def of(cls, raw: RawObject) -> Self:
        namespace = "" if raw.get("kind") in CLUSTER_WIDE else raw["metadata"].get("namespace", "default")
        return cls(namespace, raw["metadata"]["name"])

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class ScalingBounds:
    """Of the number of replicas by load."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What is wanted. `replicas` None: by load, within `scaling`.

    `own` are the targets and bounds that the service states itself, `effective` those in force.
    """

    model: ModelSpec
    own: Targets
    effective: Effective
    mode: ExecutionMode
    late_requests: LateRequests
    kv_cache: KvCacheSpec
    replicas: int | None
    scaling: ScalingBounds | None
    devices: int
    # Fields set in the manifest or by policies that the service does without, as they have no effect in this version.
    ignored: tuple[str, ...]

    @classmethod
    def parse(cls, spec: _Spec, served_name: str) -> Self:
        """Raises ValueError or KeyError for what the CRD would refuse."""
        execution, kv_cache = spec.get("execution", {}), spec.get("kvCache", {})
        own = Targets.parse(spec)
        return cls(
            model=ModelSpec(
                source=spec["model"]["source"],
                served_name=served_name,
                dtype=spec["model"].get("dtype", "auto"),
                max_context_tokens=spec["model"].get("maxContextTokens"),
            ),
            own=own,
            effective=merge([Layer(SPEC, own)]),
            mode=ExecutionMode(execution.get("mode", "Lanes")),
            late_requests=LateRequests(execution.get("lateRequests", "Serve")),
            kv_cache=_parse_kv_cache(kv_cache),
            replicas=spec.get("replicas", None if "scaling" in spec else 1),
            scaling=_parse_scaling(spec.get("scaling")),
            devices=spec.get("resources", {}).get("gpus", 1),
            ignored=tuple(_ignored(execution, kv_cache)),
        )

    @property
    def slo(self) -> Slo:
        """The targets in force."""
        return self.effective.slo

    @property
    def objective(self) -> Objective:
        """What its engines are held to."""
        return Objective(self.slo, self.mode, self.effective.bounds, late_requests=self.late_requests)

    def replica(self, ref: ReplicaRef, generation: int) -> ReplicaSpec:
        """One of its replicas, as an agent is asked for it."""
        return ReplicaSpec(
            ref=ref,
            generation=generation,
            model=self.model,
            objective=self.objective,
            kv_cache=self.kv_cache,
            devices=self.devices,
        )


@dataclass(frozen=True, slots=True)
class Service:
    """One InferenceService as it is now. `spec` is a text saying why, where it cannot be understood."""

    ref: ObjectRef
    uid: str
    generation: int
    resource_version: str
    spec: ServiceSpec | str
    finalizers: tuple[str, ...]
    deleting: bool
    force_delete: bool
    status: Status
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: RawObject) -> Self:
        """Never fails on a spec: what was stored under older rules must stay deletable."""
        metadata = raw["metadata"]
        try:
            spec: ServiceSpec | str = ServiceSpec.parse(raw["spec"], served_name=metadata["name"])
        except KeyError as error:
            spec = f"spec: {error.args[0]} is missing"
        except ValueError as error:
            spec = f"spec: {error}"
        return cls(
            ref=ObjectRef.of(raw),
            uid=metadata["uid"],
            generation=metadata["generation"],
            resource_version=metadata["resourceVersion"],
            spec=spec,
            finalizers=tuple(metadata.get("finalizers") or ()),
            deleting="deletionTimestamp" in metadata,
            force_delete=(metadata.get("annotations") or {}).get(FORCE_DELETE) == "true",
            status=raw.get("status") or {},
            labels=metadata.get("labels") or {},
        )

    def with_targets(self, effective: Effective) -> Self:
        """As read, with these in force; without effect where the spec could not be understood."""
        spec = self.spec
        if isinstance(spec, str):
            return self
        ignored = (*spec.ignored, *_ignored_of_policies(spec.mode, effective))
        return replace(self, spec=replace(spec, effective=effective, ignored=ignored))

    def replica_ref(self, index: int) -> ReplicaRef:
        return ReplicaRef(self.ref.namespace, self.ref.name, self.uid, index)

    @property
    def placements(self) -> dict[int, str]:
        """The node recorded for each replica."""
        return {each["replica"]: each["node"] for each in self.status.get("placements", ())}


def effective_status(effective: Effective) -> dict[str, Any]:
    """`status.effectiveSLO`, and `status.effectiveExecution` where there is any."""
    shown = effective.targets.shown()
    bounds = {name: shown.pop(name) for name in _SHARES if name in shown}
    # Zero is how no allowance is written; it says no more than its absence.
    if not effective.targets.ttft_per_1k_input_tokens_s and effective.sources["ttftPer1kInputTokens"] == BUILT_IN:
        shown.pop("ttftPer1kInputTokens", None)
    sources = {name: source for name, source in effective.sources.items() if name in shown or name in bounds}
    slo = {
        **shown,
        "source": ", ".join(dict.fromkeys(sources.values()))[:_SOURCE_LIMIT],
        "sources": [{"field": name, "source": source} for name, source in sources.items()],
    }
    return {"effectiveSLO": slo, "effectiveExecution": bounds} if bounds else {"effectiveSLO": slo}


_SOURCE_LIMIT: Final = 256
_BELOW_THE_DEVICE: Final = ("hostMemory", "nvme")
_FOR_LATER_PROMPTS: Final = (*_BELOW_THE_DEVICE, "idleTimeout")
_MODES_WITH_A_BORDER: Final = (ExecutionMode.LANES, ExecutionMode.AUTO)
_SHARES: Final = ("minDecodeShare", "maxDecodeShare")


def _ignored(execution: Mapping[str, Any], kv_cache: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    mode = execution.get("mode", "Lanes")
    if mode not in _MODES_WITH_A_BORDER:
        found += [f"spec.execution.{name} ({mode} has no border to move)" for name in _SHARES if name in execution]
    if mode == ExecutionMode.DISAGGREGATED:
        later = (name for name in _FOR_LATER_PROMPTS if kv_cache.get(name))
        found += [f"spec.kvCache.{name} ({mode} keeps no KV for later prompts)" for name in later]
    asked = {"dtype": kv_cache.get("dtype", "auto") != "auto", "prefetch": kv_cache.get("prefetch", False)}
    for name in (name for name, so in asked.items() if so):
        if mode == ExecutionMode.DISAGGREGATED:
            found.append(f"spec.kvCache.{name} ({mode} keeps no KV for later prompts)")
        elif not any(kv_cache.get(below) for below in _BELOW_THE_DEVICE):
            found.append(f"spec.kvCache.{name} (is of KV below the device: set hostMemory or nvme)")
    if mode == ExecutionMode.MIXED_BATCH and execution.get("lateRequests") == LateRequests.REFUSE:
        found.append(f"spec.execution.lateRequests ({mode} sets nobody aside)")
    return found


def _ignored_of_policies(mode: ExecutionMode, effective: Effective) -> list[str]:
    if mode in _MODES_WITH_A_BORDER:
        return []
    theirs = {name: effective.sources.get(name, SPEC) for name in _SHARES}
    return [f"{name} of {source} ({mode} has no border to move)" for name, source in theirs.items() if source != SPEC]


def _parse_scaling(scaling: Mapping[str, int] | None) -> ScalingBounds | None:
    # Stored before the schema refused it, 0 is the fewest that can serve: with none there is no load to go by.
    return ScalingBounds(max(1, scaling["min"]), scaling["max"]) if scaling else None


def _parse_kv_cache(kv_cache: Mapping[str, Any]) -> KvCacheSpec:
    idle_timeout = kv_cache.get("idleTimeout")
    return KvCacheSpec(
        dtype=kv_cache.get("dtype", "auto"),
        host_memory_bytes=parse_memory(kv_cache.get("hostMemory", 0)),
        nvme_bytes=parse_memory(kv_cache.get("nvme", 0)),
        idle_timeout_s=parse_duration_s(idle_timeout) if idle_timeout else None,
        prefetch=bool(kv_cache.get("prefetch", False)),
    )
