"""What the schema refuses without an API server; tests/e2e shows that the API server refuses the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from control_plane.wrong_manifests import (
    POLICY,
    PROFILE,
    RIGHT,
    WRONG,
    WRONG_POLICIES,
    WRONG_PROFILES,
    Wrong,
    edited,
)
from tidelane.operator import crd
from tidelane.operator.validation import Schema, Schemas


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas()


@pytest.fixture(scope="module")
def schema(schemas: Schemas) -> Schema:
    return schemas.of(crd.KIND)


@pytest.mark.parametrize("wrong", WRONG + WRONG_POLICIES + WRONG_PROFILES, ids=str)
def test_refused_for_field_and_rule(schemas: Schemas, wrong: Wrong) -> None:
    problems = schemas.of(wrong.kind).problems(wrong.manifest)
    assert {problem.field for problem in problems} == set(wrong.fields)
    assert any(problem.field == wrong.refused_field and wrong.rule in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec.slo.ttft", "1h"),
        ("spec.slo.ttft", "1s500ms"),
        ("spec.slo.ttftPer1kInputTokens", "0s"),
        ("spec.slo.maxTokenGap", "50ms"),
        ("spec.slo.tpot", None),
        ("spec.slo", None),
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


@pytest.mark.parametrize(
    "manifest",
    [
        POLICY,
        PROFILE,
        edited("spec.selector", {}, POLICY),
        edited("spec.defaults", None, POLICY),
        edited("spec.overrides", None, POLICY),
        edited("spec.selector.namespaceSelector.matchLabels", {"team": ""}, POLICY),
        edited("spec.selector.matchExpressions", [{"key": "a", "operator": "NotIn", "values": ["b"]}], POLICY),
        edited("spec.guards", None, PROFILE),
    ],
)
def test_other_kinds_accepted(schemas: Schemas, manifest: Mapping[str, Any]) -> None:
    assert schemas.of(manifest["kind"]).problems(manifest) == ()


def test_a_policy_is_tried_before_it_holds(schemas: Schemas) -> None:
    filled = schemas.of(crd.POLICY_KIND).with_defaults(edited("spec.mode", None, POLICY))
    assert filled["spec"]["mode"] == "DryRun"


def test_defaults_are_filled_in_and_the_manifest_stays(schema: Schema) -> None:
    filled = schema.with_defaults(RIGHT)
    assert filled["spec"]["execution"] == {"mode": "Lanes", "lateRequests": "Serve"}
    assert filled["spec"]["resources"] == {"gpus": 1}
    assert "percentile" not in filled["spec"]["slo"]
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


def _unknown_words(schema: Mapping[str, Any], at: str) -> list[str]:
    """A text with a comma that lost its quotes becomes a word of its own."""
    found = [f"{at}: {word}" for word in schema if " " in word]
    for name, below in schema.get("properties", {}).items():
        found += _unknown_words(below, f"{at}.{name}")
    return found + (_unknown_words(schema["items"], f"{at}[]") if "items" in schema else [])


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (crd.KIND, "spec"),
        (crd.KIND, "status"),
        (crd.POLICY_KIND, "spec"),
        (crd.POLICY_KIND, "status"),
        (crd.PROFILE_KIND, "spec"),
    ],
)
def test_every_field_is_described_and_bounded(kind: str, part: str) -> None:
    [version] = crd.load(kind)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"][part]
    assert _unknown_words(schema, part) == []
    assert [at for at in _undescribed(schema, part) if not at.endswith("[]")] == []
    assert _unbounded(schema, part) == []


def test_rules_on_the_values_of_a_map_are_not_silently_skipped() -> None:
    rules = [{"rule": "size(self) > 1", "message": "short"}]
    values = {"type": "string", "x-kubernetes-validations": rules}
    schema = {"openAPIV3Schema": {"type": "object", "additionalProperties": values}}
    with pytest.raises(ValueError, match="put them on the map"):
        Schema({"spec": {"versions": [{"name": "v1", "schema": schema}]}}, "v1")


def test_transition_rules_are_not_silently_skipped() -> None:
    rules = [{"rule": "self == oldSelf", "message": "immutable"}]
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-validations": rules}}
    with pytest.raises(ValueError, match="transition rules"):
        Schema({"spec": {"versions": [{"name": "v1", "schema": schema}]}}, "v1")
