"""InferenceService: from what the API server holds to frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NotRequired, Self, TypedDict

from typing_extensions import override

from tidelane.engine.slo import Slo
from tidelane.operator.crd import GROUP
from tidelane.operator.quantities import format_duration, parse_duration_s, parse_memory
from tidelane.rpc.wire import (
    ExecutionMode,
    KvCacheSpec,
    LateRequests,
    ModelSpec,
    Objective,
    ReplicaRef,
    ReplicaSpec,
    ShareBounds,
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


class Status(TypedDict, total=False):
    """`status` of an InferenceService; the CRD says what each field means."""

    observedGeneration: int
    conditions: Sequence[Condition]
    placements: Sequence[Placement]
    replicas: int
    readyReplicas: int
    endpoint: str
    effectiveSLO: Mapping[str, Any]
    ttft: str
    tpot: str
    attainment: int
    goodput: str
    lanes: Sequence[Mapping[str, Any]]
    measuredAt: str


class _Spec(TypedDict):
    model: Mapping[str, Any]
    slo: Mapping[str, Any]
    execution: NotRequired[Mapping[str, Any]]
    kvCache: NotRequired[Mapping[str, Any]]
    replicas: NotRequired[int]
    scaling: NotRequired[Mapping[str, int]]
    resources: NotRequired[Mapping[str, int]]


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    """Which object of its kind."""

    namespace: str
    name: str

    @classmethod
    def of(cls, raw: RawObject) -> Self:
        return cls(raw["metadata"].get("namespace", "default"), raw["metadata"]["name"])

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What is wanted. `replicas` None: by load, between bounds that this version cannot follow."""

    model: ModelSpec
    slo: Slo
    mode: ExecutionMode
    late_requests: LateRequests
    bounds: ShareBounds | None
    kv_cache: KvCacheSpec
    replicas: int | None
    devices: int
    # Fields set in the manifest that ask for what this version cannot do.
    unsupported: tuple[str, ...]
    # Fields set in the manifest that the service does without, as they have no effect in this version.
    ignored: tuple[str, ...]

    @classmethod
    def parse(cls, spec: _Spec, served_name: str) -> Self:
        """Raises ValueError or KeyError for what the CRD would refuse."""
        execution, kv_cache = spec.get("execution", {}), spec.get("kvCache", {})
        return cls(
            model=ModelSpec(
                source=spec["model"]["source"],
                served_name=served_name,
                dtype=spec["model"].get("dtype", "auto"),
                max_context_tokens=spec["model"].get("maxContextTokens"),
            ),
            slo=_parse_slo(spec["slo"]),
            mode=ExecutionMode(execution.get("mode", "Lanes")),
            late_requests=LateRequests(execution.get("lateRequests", "Serve")),
            bounds=_parse_bounds(execution),
            kv_cache=_parse_kv_cache(kv_cache),
            replicas=spec.get("replicas"),
            devices=spec.get("resources", {}).get("gpus", 1),
            unsupported=tuple(_unsupported(spec)),
            ignored=tuple(_ignored(execution, kv_cache)),
        )

    def replica(self, ref: ReplicaRef, generation: int) -> ReplicaSpec:
        """One of its replicas, as an agent is asked for it."""
        return ReplicaSpec(
            ref=ref,
            generation=generation,
            model=self.model,
            objective=Objective(self.slo, self.mode, self.bounds, late_requests=self.late_requests),
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
        )

    def replica_ref(self, index: int) -> ReplicaRef:
        return ReplicaRef(self.ref.namespace, self.ref.name, self.uid, index)

    @property
    def placements(self) -> dict[int, str]:
        """The node recorded for each replica."""
        return {each["replica"]: each["node"] for each in self.status.get("placements", ())}


def slo_status(slo: Slo, source: str) -> dict[str, Any]:
    """The SLO as `status.effectiveSLO` shows it."""
    shown: dict[str, Any] = {"ttft": format_duration(slo.ttft_s), "tpot": format_duration(slo.tpot_s)}
    if slo.ttft_per_1k_input_tokens_s:
        shown["ttftPer1kInputTokens"] = format_duration(slo.ttft_per_1k_input_tokens_s)
    if slo.max_token_gap_s is not None:
        shown["maxTokenGap"] = format_duration(slo.max_token_gap_s)
    return shown | {"percentile": slo.percentile, "source": source}


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


def _unsupported(spec: _Spec) -> list[str]:
    return ["spec.scaling (use spec.replicas)"] if "scaling" in spec else []


def _parse_slo(slo: Mapping[str, Any]) -> Slo:
    gap = slo.get("maxTokenGap")
    return Slo(
        ttft_s=parse_duration_s(slo["ttft"]),
        tpot_s=parse_duration_s(slo["tpot"]),
        ttft_per_1k_input_tokens_s=parse_duration_s(slo.get("ttftPer1kInputTokens", "0s")),
        percentile=slo.get("percentile", 99),
        max_token_gap_s=parse_duration_s(gap) if gap else None,
    )


def _parse_bounds(execution: Mapping[str, Any]) -> ShareBounds | None:
    if not execution.keys() & set(_SHARES):
        return None
    return ShareBounds(execution.get("minDecodeShare", 0) / 100, execution.get("maxDecodeShare", 100) / 100)


def _parse_kv_cache(kv_cache: Mapping[str, Any]) -> KvCacheSpec:
    idle_timeout = kv_cache.get("idleTimeout")
    return KvCacheSpec(
        dtype=kv_cache.get("dtype", "auto"),
        host_memory_bytes=parse_memory(kv_cache.get("hostMemory", 0)),
        nvme_bytes=parse_memory(kv_cache.get("nvme", 0)),
        idle_timeout_s=parse_duration_s(idle_timeout) if idle_timeout else None,
        prefetch=bool(kv_cache.get("prefetch", False)),
    )
