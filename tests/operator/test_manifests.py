"""YAML in, manifests or the reason why not out."""

from __future__ import annotations

import json

import pytest

from control_plane.wrong_manifests import RIGHT, edited
from tidelane.operator.manifests import ManifestError, read_manifests
from tidelane.operator.validation import Schemas


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas()


def test_several_documents_and_empty_ones(schemas: Schemas) -> None:
    text = "---\n---\n" + json.dumps(RIGHT) + "\n---\n" + json.dumps(edited("metadata.name", "other")) + "\n---\n"
    found = read_manifests(text, "x.yaml", schemas)
    assert [(each.index, each.manifest["metadata"]["name"]) for each in found] == [(2, "chat"), (3, "other")]
    assert found[0].manifest["spec"]["resources"] == {"gpus": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "x.yaml: not YAML"),
        # What PyYAML's own errors do not cover; the first is a template that nobody rendered.
        ("metadata: {name: {{ .Values.name }}}", "x.yaml: not YAML"),
        ("[1]: 2", "x.yaml: not YAML"),
        ("a: !!int x", "x.yaml: not YAML"),
        ("a: " + "[" * 5000, "x.yaml: not YAML"),
        ("a: 1\na: 2", "key 'a' given twice"),
        ("a: 1\nb: &x\n  c: *x", 'unconstructable recursive node\n  in "<unicode string>", line 2, column 4'),
        ("a: 1\nb:\n- &x [1, [*x]]", 'unconstructable recursive node\n  in "<unicode string>", line 3, column 3'),
        ("just text", "x.yaml, document 1: must be a mapping"),
        ("{apiVersion: v1, kind: Pod}", "x.yaml, document 1: kind: Pod of v1"),
        (
            "{apiVersion: tidelane.dev/v1alpha1, kind: InferenceService, metadata: {}}",
            "x.yaml, document 1: metadata.name: Required value",
        ),
        (json.dumps(edited("metadata.labels", {"a": 1})), "metadata.labels: Invalid value"),
        (json.dumps(edited("metadata.namespace", "A")), "metadata.namespace: Invalid value"),
        (json.dumps(edited("spec.slo.ttft", "0s")), "x.yaml, document 1: spec.slo.ttft: Invalid value"),
    ],
)
def test_refused_with_file_document_field_and_rule(schemas: Schemas, text: str, said: str) -> None:
    with pytest.raises(ManifestError) as refusal:
        read_manifests(text, "x.yaml", schemas)
    assert said in str(refusal.value)


def test_dates_stay_strings_as_in_kubernetes(schemas: Schemas) -> None:
    text = json.dumps(edited("metadata.annotations", {"day": "?"})).replace('"?"', "2030-01-01")
    [found] = read_manifests(text, "x.yaml", schemas)
    assert found.manifest["metadata"]["annotations"] == {"day": "2030-01-01"}
