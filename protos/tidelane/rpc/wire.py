"""Wire messages as frozen dataclasses, and back.

`*_from_wire` is the only place where a message is checked: what it returns is valid. It raises ValueError, and the text
begins with the path of the field at fault. Absent and zero fields take the meaning that the .proto gives them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from typing_extensions import override

from tidelane.engine.machine_report import MachineReport, ReportedTimes
from tidelane.engine.slo import Slo
from tidelane.engine.workload import Lengths, Sketch
from tidelane.rpc import node_agent_pb2, serving_pb2


class ExecutionMode(StrEnum):
    """How prefill and decode share a device; the values are those of `spec.execution.mode`."""

    LANES = "Lanes"
    AUTO = "Auto"
    CHUNKED_PREFILL = "ChunkedPrefill"
    MIXED_BATCH = "MixedBatch"
    STATIC_LANES = "StaticLanes"
    DISAGGREGATED = "Disaggregated"


_MODES = {
    ExecutionMode.LANES: serving_pb2.LANES,
    ExecutionMode.AUTO: serving_pb2.AUTO,
    ExecutionMode.CHUNKED_PREFILL: serving_pb2.CHUNKED_PREFILL,
    ExecutionMode.MIXED_BATCH: serving_pb2.MIXED_BATCH,
    ExecutionMode.STATIC_LANES: serving_pb2.STATIC_LANES,
    ExecutionMode.DISAGGREGATED: serving_pb2.DISAGGREGATED,
}
_MODES_BY_NUMBER = {number: mode for mode, number in _MODES.items()}


class LateRequests(StrEnum):
    """What becomes of requests that would miss their TTFT; the values are those of `spec.execution.lateRequests`."""

    SERVE = "Serve"
    REFUSE = "Refuse"


_LATE_REQUESTS = {LateRequests.SERVE: serving_pb2.SERVE, LateRequests.REFUSE: serving_pb2.REFUSE}
_LATE_REQUESTS_BY_NUMBER = {
    serving_pb2.LATE_REQUESTS_UNSPECIFIED: LateRequests.SERVE,
    **{number: late for late, number in _LATE_REQUESTS.items()},
}


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """The least and the most of a device that decode may have while prefill runs beside it, each in [0, 1]."""

    min_decode_share: float
    max_decode_share: float

    def __post_init__(self) -> None:
        if not 0 <= self.min_decode_share <= self.max_decode_share <= 1:
            raise ValueError("decode shares must satisfy 0 <= min <= max <= 1")


@dataclass(frozen=True, slots=True)
class Objective:
    """What an agent holds its engine to. `bounds` None: the engine's own. `revision` counts up within one replica."""

    slo: Slo
    mode: ExecutionMode
    bounds: ShareBounds | None = None
    revision: int = 0
    late_requests: LateRequests = LateRequests.SERVE


@dataclass(frozen=True, slots=True, order=True)
class ReplicaRef:
    """Which replica of which service. The uid tells a service from a later one of the same name."""

    namespace: str
    service: str
    service_uid: str
    index: int

    def __post_init__(self) -> None:
        if not (self.namespace and self.service and self.service_uid):
            raise ValueError("namespace, service and service_uid must not be empty")

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.service}/{self.index} (uid {self.service_uid})"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model, how it is loaded and under which name clients ask for it. `max_context_tokens` None: the model's."""

    source: str
    served_name: str
    dtype: str = "auto"
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.source.startswith(("builtin://", "hf://", "pvc://", "file://")):
            raise ValueError(f"source: {self.source!r} must start with builtin://, hf://, pvc:// or file://")
        if not self.served_name:
            raise ValueError("served_name must not be empty")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype: {self.dtype!r} must be auto, float32, bfloat16 or float16")


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """Where KV may go besides the device. `idle_timeout_s` None: the engine's own."""

    dtype: str = "auto"
    host_memory_bytes: int = 0
    nvme_bytes: int = 0
    idle_timeout_s: float | None = None
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bf16", "fp8", "int8", "int4"):
            raise ValueError(f"dtype: {self.dtype!r} must be auto, bf16, fp8, int8 or int4")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica as the operator wants it. `port` None: the agent chooses."""

    ref: ReplicaRef
    generation: int
    model: ModelSpec
    objective: Objective
    kv_cache: KvCacheSpec = KvCacheSpec()
    devices: int = 1
    port: int | None = None

    def __post_init__(self) -> None:
        if self.generation < 1:
            raise ValueError("generation must be at least 1")
        if self.devices < 1:
            raise ValueError("devices must be at least 1")
        if self.port is not None and not 0 < self.port < 65536:
            raise ValueError(f"port: {self.port} must lie between 1 and 65535")

    def takes_another_engine(self, running: ReplicaSpec) -> bool:
        """Whether this is more than another objective for one that runs as `running`, which takes that as it runs."""
        # A port left to the agent stays what it is.
        port = self.port if self.port is not None else running.port
        return replace(self, objective=running.objective, generation=running.generation, port=port) != running


@dataclass(frozen=True, slots=True)
class Workload:
    """What came to an engine lately, and what it runs on; `machine` None: there is no simulating it."""

    sketch: Sketch
    machine: MachineReport | None = None


def slo_to_wire(slo: Slo) -> serving_pb2.Slo:
    return serving_pb2.Slo(
        ttft_s=slo.ttft_s,
        ttft_per_1k_input_tokens_s=slo.ttft_per_1k_input_tokens_s,
        tpot_s=slo.tpot_s,
        percentile=slo.percentile,
        max_token_gap_s=slo.max_token_gap_s or 0.0,
    )


def slo_from_wire(message: serving_pb2.Slo, path: str = "slo") -> Slo:
    _finite(message, path, "ttft_s", "ttft_per_1k_input_tokens_s", "tpot_s", "max_token_gap_s")
    with _At(path):
        return Slo(
            ttft_s=message.ttft_s,
            tpot_s=message.tpot_s,
            ttft_per_1k_input_tokens_s=message.ttft_per_1k_input_tokens_s,
            percentile=message.percentile,
            max_token_gap_s=message.max_token_gap_s or None,
        )


def objective_to_wire(objective: Objective) -> serving_pb2.Objective:
    bounds = objective.bounds
    return serving_pb2.Objective(
        slo=slo_to_wire(objective.slo),
        mode=_MODES[objective.mode],
        min_decode_share=bounds.min_decode_share if bounds else 0.0,
        max_decode_share=bounds.max_decode_share if bounds else 0.0,
        revision=objective.revision,
        late_requests=_LATE_REQUESTS[objective.late_requests],
    )


def objective_from_wire(message: serving_pb2.Objective, path: str = "objective") -> Objective:
    slo = slo_from_wire(message.slo, f"{path}.slo")
    mode = _MODES_BY_NUMBER.get(message.mode)
    if mode is None:
        raise ValueError(f"{path}.mode: {message.mode} is no known mode")
    _finite(message, path, "min_decode_share", "max_decode_share")
    bounds = None
    if message.min_decode_share or message.max_decode_share:
        with _At(path):
            bounds = ShareBounds(message.min_decode_share, message.max_decode_share)
    late_requests = _LATE_REQUESTS_BY_NUMBER.get(message.late_requests)
    if late_requests is None:
        raise ValueError(f"{path}.late_requests: {message.late_requests} is neither SERVE nor REFUSE")
    return Objective(slo, mode, bounds, message.revision, late_requests)


def ref_to_wire(ref: ReplicaRef) -> node_agent_pb2.ReplicaId:
    return node_agent_pb2.ReplicaId(
        namespace=ref.namespace, service=ref.service, service_uid=ref.service_uid, index=ref.index
    )


def ref_from_wire(message: node_agent_pb2.ReplicaId, path: str = "id") -> ReplicaRef:
    with _At(path):
        return ReplicaRef(message.namespace, message.service, message.service_uid, message.index)


def spec_to_wire(spec: ReplicaSpec) -> node_agent_pb2.ReplicaSpec:
    model, kv_cache = spec.model, spec.kv_cache
    return node_agent_pb2.ReplicaSpec(
        id=ref_to_wire(spec.ref),
        generation=spec.generation,
        model=node_agent_pb2.ModelSpec(
            source=model.source,
            dtype=model.dtype,
            max_context_tokens=model.max_context_tokens or 0,
            served_name=model.served_name,
        ),
        objective=objective_to_wire(spec.objective),
        kv_cache=node_agent_pb2.KvCacheSpec(
            dtype=kv_cache.dtype,
            host_memory_bytes=kv_cache.host_memory_bytes,
            nvme_bytes=kv_cache.nvme_bytes,
            idle_timeout_s=kv_cache.idle_timeout_s or 0.0,
            prefetch=kv_cache.prefetch,
        ),
        devices=spec.devices,
        port=spec.port or 0,
    )


def spec_from_wire(message: node_agent_pb2.ReplicaSpec, path: str = "spec") -> ReplicaSpec:
    ref = ref_from_wire(message.id, f"{path}.id")
    with _At(f"{path}.model"):
        model = ModelSpec(
            source=message.model.source,
            served_name=message.model.served_name,
            dtype=message.model.dtype or "auto",
            max_context_tokens=message.model.max_context_tokens or None,
        )
    _finite(message.kv_cache, f"{path}.kv_cache", "idle_timeout_s")
    with _At(f"{path}.kv_cache"):
        kv_cache = KvCacheSpec(
            dtype=message.kv_cache.dtype or "auto",
            host_memory_bytes=message.kv_cache.host_memory_bytes,
            nvme_bytes=message.kv_cache.nvme_bytes,
            idle_timeout_s=message.kv_cache.idle_timeout_s or None,
            prefetch=message.kv_cache.prefetch,
        )
    objective = objective_from_wire(message.objective, f"{path}.objective")
    with _At(path):
        return ReplicaSpec(
            ref=ref,
            generation=message.generation,
            model=model,
            objective=objective,
            kv_cache=kv_cache,
            devices=message.devices or 1,
            port=message.port or None,
        )


def workload_to_wire(workload: Workload) -> serving_pb2.Workload:
    sketch, machine = workload.sketch, workload.machine
    return serving_pb2.Workload(
        observed_s=sketch.observed_s,
        requests=sketch.requests,
        flex_requests=sketch.flex_requests,
        gaps=sketch.gaps,
        gaps_s=sketch.gaps_s,
        gaps_squared_s2=sketch.gaps_squared_s2,
        prompt_tokens=_lengths_to_wire(sketch.prompts),
        output_tokens=_lengths_to_wire(sketch.outputs),
        reused_tokens=_lengths_to_wire(sketch.reused),
        machine=None if machine is None else _machine_to_wire(machine),
    )


def workload_from_wire(message: serving_pb2.Workload, path: str = "workload") -> Workload:
    _finite(message, path, "observed_s", "gaps_s", "gaps_squared_s2")
    lengths = {}
    for name in ("prompt_tokens", "output_tokens", "reused_tokens"):
        with _At(f"{path}.{name}"):
            each: serving_pb2.Lengths = getattr(message, name)
            lengths[name] = Lengths(tuple(each.counts), each.tokens)
    with _At(path):
        sketch = Sketch(
            message.observed_s,
            message.requests,
            message.flex_requests,
            message.gaps,
            message.gaps_s,
            message.gaps_squared_s2,
            prompts=lengths["prompt_tokens"],
            outputs=lengths["output_tokens"],
            reused=lengths["reused_tokens"],
        )
    machine = _machine_from_wire(message.machine, f"{path}.machine") if message.HasField("machine") else None
    return Workload(sketch, machine)


def _lengths_to_wire(lengths: Lengths) -> serving_pb2.Lengths:
    return serving_pb2.Lengths(counts=lengths.counts, tokens=lengths.tokens)


def _machine_to_wire(machine: MachineReport) -> serving_pb2.Machine:
    return serving_pb2.Machine(
        device=machine.device,
        units=machine.units,
        dtype=machine.dtype,
        layers=machine.layers,
        block_tokens=machine.block_tokens,
        kv_tokens=machine.kv_tokens,
        decode_units=machine.decode_units,
        times=[serving_pb2.PassTimes(**{name: getattr(each, name) for name in _TIMES}) for each in machine.times],
        decode_slowdown=machine.decode_slowdown,
        prefill_slowdown=machine.prefill_slowdown,
        guard=machine.guard,
    )


_TIMES = ("phase", "units", "knots", "linear_s", "pair_s", "context_s", "sequence_s")


def _machine_from_wire(message: serving_pb2.Machine, path: str) -> MachineReport:
    _finite(message, path, "decode_slowdown", "prefill_slowdown", "guard")
    times = []
    for at, each in enumerate(message.times):
        where = f"{path}.times[{at}]"
        _finite(each, where, "pair_s", "context_s", "sequence_s")
        with _At(where):
            times.append(
                ReportedTimes(
                    each.phase,
                    each.units,
                    tuple(each.knots),
                    tuple(each.linear_s),
                    each.pair_s,
                    each.context_s,
                    each.sequence_s,
                )
            )
    with _At(path):
        return MachineReport(
            message.device,
            message.units,
            message.dtype,
            message.layers,
            message.block_tokens,
            message.kv_tokens,
            tuple(message.decode_units),
            tuple(times),
            message.decode_slowdown,
            message.prefill_slowdown,
            message.guard,
        )


class _At:
    """Puts the field's path in front of a ValueError raised within."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self._path}: {error}") from error


def _finite(message: object, path: str, *fields: str) -> None:
    for field in fields:
        value: float = getattr(message, field)
        # NaN passes every comparison's negation, so it must be caught before the ranges are checked.
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{path}.{field}: {value} must be a finite number, not negative")
