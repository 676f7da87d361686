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


@dataclass(frozen=True)
class Wrong:
    """One edit of RIGHT; None removes the field. `rule` is part of the refusal's text."""

    field: str
    value: Any
    refused_field: str
    rule: str
    # Every field that the refusal names.
    fields: tuple[str, ...]

    @property
    def manifest(self) -> dict[str, Any]:
        return edited(self.field, self.value)

    @override
    def __str__(self) -> str:
        return f"{self.field}={self.value}"


def edited(field: str, value: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(dict(RIGHT))
    *parents, last = field.split(".")
    target = manifest
    for parent in parents:
        target = target.setdefault(parent, {})
    if value is None:
        del target[last]
    else:
        target[last] = value
    return manifest


def _wrong(field: str, value: Any, rule: str, at: str | None = None, also: str | None = None) -> Wrong:
    refused = field if at is None else at
    return Wrong(field, value, refused, rule, (refused, also) if also else (refused,))


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
    _wrong("spec.slo.tpot", None, "Required value"),
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
    _wrong("spec.replicas", None, "set exactly one of replicas", "spec"),
    _wrong("spec.scaling", {"min": 1, "max": 2}, "set exactly one of replicas", "spec"),
    _wrong("spec.scaling", {"min": 3, "max": 2}, "min must not exceed max", "spec.scaling.min", "spec"),
    _wrong("spec.replicas", -1, "should be greater than or equal to 0"),
    _wrong("spec.replicas", 65, "should be less than or equal to 64"),
    _wrong("spec.resources.gpus", 0, "should be greater than or equal to 1"),
    _wrong("spec", None, "Required value"),
    _wrong("metadata.name", "4chat", "should match"),
    _wrong("metadata.name", "a" * 54, "Too long"),
)  # fmt: skip
