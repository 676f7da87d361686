"""What the schema refuses without an API server; tests/e2e shows that the API server refuses the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from control_plane.wrong_manifests import RIGHT, WRONG, Wrong, edited
from tidelane.operator import crd
from tidelane.operator.validation import Schema


@pytest.fixture(scope="module")
def schema() -> Schema:
    return Schema(crd.load(), crd.VERSION)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_refused_for_field_and_rule(schema: Schema, wrong: Wrong) -> None:
    problems = schema.problems(wrong.manifest)
    assert {problem.field for problem in problems} == set(wrong.fields)
    assert any(problem.field == wrong.refused_field and wrong.rule in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec.slo.ttft", "1h"),
        ("spec.slo.ttft", "1s500ms"),
        ("spec.slo.ttftPer1kInputTokens", "0s"),
        ("spec.slo.maxTokenGap", "50ms"),
        ("spec.model.source", "hf://org/name@v1.0"),
        ("spec.model.source", "pvc://models/llama/8b"),
        ("spec.model.source", "file:///srv/model.gguf"),
        ("spec.kvCache", {"hostMemory": 1024, "nvme": "64Gi"}),
        ("spec.execution", {"minDecodeShare": 50, "maxDecodeShare": 50}),
        ("spec.execution.lateRequests", "Refuse"),
        ("spec.replicas", 0),
    ],
)
def test_accepted(schema: Schema, field: str, value: Any) -> None:
    assert schema.problems(edited(field, value)) == ()


def test_defaults_are_filled_in_and_the_manifest_stays(schema: Schema) -> None:
    filled = schema.with_defaults(RIGHT)
    assert filled["spec"]["execution"] == {"mode": "Lanes", "lateRequests": "Serve"}
    assert filled["spec"]["resources"] == {"gpus": 1}
    assert filled["spec"]["slo"]["percentile"] == 99
    assert filled["spec"]["model"]["dtype"] == "auto"
    assert "kvCache" not in filled["spec"]
    assert "execution" not in RIGHT["spec"]
    assert schema.with_defaults(filled) == filled


def _undescribed(schema: Mapping[str, Any], at: str) -> list[str]:
    found = [] if "description" in schema else [at]
    for name, below in schema.get("properties", {}).items():
        found += _undescribed(below, f"{at}.{name}")
    return found + (_undescribed(schema["items"], f"{at}[]") if "properties" in schema.get("items", {}) else [])


def _unbounded(schema: Mapping[str, Any], at: str) -> list[str]:
    limits = {
        "string": ("maxLength", "enum", "format"),
        "array": ("maxItems",),
        "integer": ("maximum", "enum", "format"),
    }
    kind = schema.get("type")
    found = [] if kind not in limits or any(limit in schema for limit in limits[kind]) else [at]
    for name, below in schema.get("properties", {}).items():
        found += _unbounded(below, f"{at}.{name}")
    return found + (_unbounded(schema["items"], f"{at}[]") if "items" in schema else [])


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_is_described_and_bounded(part: str) -> None:
    [version] = crd.load()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"][part]
    assert [at for at in _undescribed(schema, part) if not at.endswith("[]")] == []
    assert _unbounded(schema, part) == []


def test_transition_rules_are_not_silently_skipped() -> None:
    rules = [{"rule": "self == oldSelf", "message": "immutable"}]
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-validations": rules}}
    with pytest.raises(ValueError, match="transition rules"):
        Schema({"spec": {"versions": [{"name": "v1", "schema": schema}]}}, "v1")
