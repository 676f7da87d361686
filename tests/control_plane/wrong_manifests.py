"""Manifests that must be refused for the same field and rule by the API server and by `tidelane up`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

RIGHT: Final[Mapping[str, Any]] = {
    "apiVersion": "tidelane.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"source": "builtin://smollm2-135m-instruct", "maxContextTokens": 4096},
        "slo": {"ttft": "200ms", "tpot": "50ms"},
        "replicas": 1,
    },
}


POLICY: Final[Mapping[str, Any]] = {
    "apiVersion": "tidelane.dev/v1alpha1",
    "kind": "SLOPolicy",
    "metadata": {"name": "gold"},
    "spec": {
        "selector": {"matchLabels": {"tier": "gold"}},
        "priority": 10,
        "defaults": {"slo": {"ttft": "300ms"}},
        "overrides": {"slo": {"tpot": "40ms"}, "execution": {"minDecodeShare": 30}},
        "mode": "Enforce",
    },
}

_PASS: Final[Mapping[str, Any]] = {
    "units": 4,
    "knots": [1, 64],
    "linearSeconds": ["0.01", "2.5e-02"],
    "pairSeconds": "1.5e-09",
    "contextSeconds": "0",
    "sequenceSeconds": "0.0001",
}
PROFILE: Final[Mapping[str, Any]] = {
    "apiVersion": "tidelane.dev/v1alpha1",
    "kind": "ModelProfile",
    "metadata": {"name": "smollm2-on-4-cores"},
    "spec": {
        "weightsDigest": "sha256:0123",
        "device": "a CPU",
        "units": 4,
        "dtype": "float32",
        "layers": 30,
        "measured": "2026-01-31",
        "contention": {"decodeSlowdown": "1.15", "prefillSlowdown": "1.05", "guard": "1.2"},
        "times": [{"phase": "decode", **_PASS}, {"phase": "prefill", **_PASS}],
        "guards": [
            {
                "units": 2,
                "newTokens": 2048,
                "reusedTokens": 2048,
                "batch": 4,
                "contextTokens": 8192,
                "slowdown": "1.1",
            }
        ],
    },
}


@dataclass(frozen=True)
class Wrong:
    """One edit of `base`; None removes the field. `rule` is part of the refusal's text."""

    field: str
    value: Any
    refused_field: str
    rule: str
    # Every field that the refusal names.
    fields: tuple[str, ...]
    base: Mapping[str, Any]

    @property
    def kind(self) -> str:
        kind: str = self.base["kind"]
        return kind

    @property
    def manifest(self) -> dict[str, Any]:
        return edited(self.field, self.value, self.base)

    @override
    def __str__(self) -> str:
        return f"{self.field}={self.value}" if self.base is RIGHT else f"{self.kind}.{self.field}={self.value}"[:80]


def edited(field: str, value: Any, base: Mapping[str, Any] = RIGHT) -> dict[str, Any]:
    manifest = copy.deepcopy(dict(base))
    *parents, last = field.split(".")
    target = manifest
    for parent in parents:
        target = target.setdefault(parent, {})
    if value is None:
        del target[last]
    else:
        target[last] = value
    return manifest


def _wrong(
    field: str,
    value: Any,
    rule: str,
    at: str | None = None,
    also: str | None = None,
    base: Mapping[str, Any] = RIGHT,
) -> Wrong:
    refused = field if at is None else at
    return Wrong(field, value, refused, rule, (refused, also) if also else (refused,), base)


def _policy(field: str, value: Any, rule: str, at: str | None = None, also: str | None = None) -> Wrong:
    return _wrong(field, value, rule, at, also, POLICY)


def _profile(field: str, value: Any, rule: str, at: str | None = None, also: str | None = None) -> Wrong:
    return _wrong(field, value, rule, at, also, PROFILE)


_DURATION = "must be a duration longer than 0 and at most 1h"
WRONG: Final = (
    _wrong("spec.slo.ttft", "200", "should match"),
    _wrong("spec.slo.ttft", "200", _DURATION),
    _wrong("spec.slo.ttft", "0.2s", _DURATION),
    _wrong("spec.slo.ttft", "-200ms", _DURATION),
    _wrong("spec.slo.ttft", "200us", _DURATION),
    _wrong("spec.slo.tpot", "0s", _DURATION),
    _wrong("spec.slo.tpot", "1h1ms", _DURATION),
    _wrong("spec.slo.tpot", 50, "must be of type string"),
    _wrong("spec.slo.tpot", "1s" * 15, "Too long"),
    _wrong("spec.slo.ttftPer1kInputTokens", "2h", "must be a duration of at most 1h"),
    _wrong("spec.slo.maxTokenGap", "49ms", "must be at least tpot"),
    _wrong("spec.slo.percentile", 98, "supported values"),
    _wrong("spec.slo.percentile", "99", "must be of type integer"),
    _wrong("spec.slo.itl", "50ms", "unknown field"),
    _wrong("spec.sloo", {"ttft": "1s"}, "unknown field"),
    _wrong("metadata.label", {"a": "b"}, "unknown field"),
    _wrong("spec.model", None, "Required value"),
    _wrong("spec.model.source", "smollm2", "must be builtin://NAME"),
    _wrong("spec.model.source", "hf://org", "must be builtin://NAME"),
    _wrong("spec.model.source", "pvc://claim", "must be builtin://NAME"),
    _wrong("spec.model.source", "builtin://gpt-7", "no such built-in model"),
    _wrong("spec.model.dtype", "int8", "supported values"),
    _wrong("spec.model.maxContextTokens", 15, "should be greater than or equal to 16"),
    _wrong("spec.model.maxContextTokens", 1.5, "must be of type integer"),
    _wrong("spec.execution.mode", "lanes", "supported values"),
    _wrong("spec.execution.lateRequests", "refuse", "supported values"),
    _wrong("spec.execution.maxDecodeShare", 100, "should be less than or equal to 99"),
    _wrong("spec.execution", {"minDecodeShare": 60, "maxDecodeShare": 40}, "must not exceed",
           "spec.execution.minDecodeShare"),
    _wrong("spec.kvCache.hostMemory", "8Gib", "should match"),
    _wrong("spec.kvCache.hostMemory", -1, "should be greater than or equal to 0"),
    _wrong("spec.kvCache.idleTimeout", "169h", "at most 168h"),
    _wrong("spec.kvCache.prefetch", "yes", "must be of type boolean"),
    _wrong("spec.scaling", {"min": 1, "max": 2}, "set one of replicas", "spec"),
    _wrong("spec.scaling", {"min": 3, "max": 2}, "min must not exceed max", "spec.scaling.min", "spec"),
    _wrong("spec.scaling", {"min": 0, "max": 2}, "min must be at least 1", "spec.scaling.min", "spec"),
    _wrong("spec.replicas", -1, "should be greater than or equal to 0"),
    _wrong("spec.replicas", 65, "should be less than or equal to 64"),
    _wrong("spec.resources.gpus", 0, "should be greater than or equal to 1"),
    _wrong("spec", None, "Required value"),
    _wrong("metadata.name", "4chat", "should match"),
    _wrong("metadata.name", "a" * 54, "Too long"),
)  # fmt: skip

_EXPRESSIONS = "spec.selector.matchExpressions"
_BOTH = "is in defaults and in overrides; keep it in overrides"
WRONG_POLICIES: Final = (
    _policy("spec.selector", None, "Required value"),
    _policy("spec.select", {}, "unknown field"),
    _policy("spec.mode", "Enforced", "supported values"),
    _policy("spec.priority", 1_000_001, "should be less than or equal to 1000000"),
    _policy("spec.overrides", {"slo": {"ttft": "1s"}}, f"ttft {_BOTH}", "spec.defaults.slo.ttft"),
    _policy("spec.defaults", {"slo": {"tpot": "1s"}}, f"tpot {_BOTH}", "spec.defaults.slo.tpot"),
    _policy("spec.defaults", {"execution": {"minDecodeShare": 1}}, f"minDecodeShare {_BOTH}",
            "spec.defaults.execution.minDecodeShare"),
    _policy("spec.defaults.slo.ttft", "0s", _DURATION),
    _policy("spec.overrides.slo.maxTokenGap", "39ms", "must be at least tpot"),
    _policy("spec.overrides.execution.maxDecodeShare", 29, "must not exceed",
            "spec.overrides.execution.minDecodeShare"),
    _policy("spec.overrides.slo.percentile", 98, "supported values"),
    _policy("spec.overrides.replicas", 3, "unknown field"),
    _policy("spec.overrides", {}, "should have at least 1 properties"),
    _policy("spec.selector.matchLabels", {"tier": "x" * 64}, "Too long", "spec.selector.matchLabels.tier"),
    _policy("spec.selector.matchLabels", {"": "x"}, "no label has such a key"),
    # NotIn with a key that no label can have would match every service.
    _policy("spec.selector.matchLabels", {"tier ": "x"}, "no label has such a key"),
    _policy("spec.selector.matchLabels", {"Team.example/tier": "x"}, "no label has such a key"),
    _policy("spec.selector.matchLabels", {"tier": "göld"}, "should match", "spec.selector.matchLabels.tier"),
    _policy(_EXPRESSIONS, [{"key": "tier/", "operator": "NotIn", "values": ["x"]}], "should match",
            f"{_EXPRESSIONS}[0].key"),
    _policy(_EXPRESSIONS, [{"key": "tier", "operator": "NotIn", "values": ["x "]}], "should match",
            f"{_EXPRESSIONS}[0].values[0]"),
    _policy("spec.selector.matchLabels", {str(each): "x" for each in range(17)}, "must have at most 16"),
    _policy(_EXPRESSIONS, [{"key": "tier", "operator": "In"}], "In and NotIn need values", f"{_EXPRESSIONS}[0].values"),
    _policy(_EXPRESSIONS, [{"key": "tier", "operator": "Exists", "values": ["x"]}], "Exists and DoesNotExist take none",
            f"{_EXPRESSIONS}[0].values"),
    _policy(_EXPRESSIONS, [{"key": "tier", "operator": "Exists"}] * 17, "must have at most 16 items"),
    _policy(_EXPRESSIONS, [{"key": "tier", "operator": "in", "values": ["x"]}], "supported values",
            f"{_EXPRESSIONS}[0].operator"),
    _policy("spec.selector.namespaceSelector.matchExpressions", [{"operator": "Exists"}], "Required value",
            "spec.selector.namespaceSelector.matchExpressions[0].key"),
    _policy("metadata.name", "a" * 64, "Too long"),
)  # fmt: skip
WRONG_PROFILES: Final = (
    _profile("spec.times", [{"phase": "decode", **_PASS}, {"phase": "fused", **_PASS}], "one of the phase prefill"),
    _profile("spec.times", [{"phase": "decode", **_PASS}], "should have at least 2 items"),
    _profile("spec.times", [{"phase": "decode", **_PASS, "knots": [1]}, {"phase": "prefill", **_PASS}],
             "must be as long as knots", "spec.times[0].linearSeconds"),
    _profile("spec.measured", "31.1.2026", "should match"),
    _profile("spec.contention.guard", 1.2, "must be of type string"),
    _profile("spec.contention.guard", "0.9", "should match"),
    _profile("spec.units", 0, "should be greater than or equal to 1"),
    _profile("spec.weights", "x", "unknown field"),
)  # fmt: skip
