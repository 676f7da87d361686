"""The API server's refusals, without an API server: the CRD's schema and CEL rules, interpreted.

A manifest that this module accepts is accepted by the API server, and one that it refuses is refused there for the same
field and rule. Unknown fields are refused too, as kubectl does by default.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import celpy
import celpy.evaluation
import jsonschema  # type: ignore[import-untyped]  # it ships none, and its stubs lag
from celpy.adapter import json_to_cel
from typing_extensions import override

from tidelane.operator import crd

Path = tuple[str | int, ...]

_METADATA_FIELDS: Final = frozenset(
    {
        "annotations",
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "labels",
        "managedFields",
        "name",
        "namespace",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)
# The API server does not try the CEL rules on an object with such an error.
_BLOCKING: Final = frozenset({"required", "type", "anyOf", "enum", "maxLength", "maxItems"})
# The API server's words for what a schema refuses.
_WORDS: Final[Mapping[str, str]] = {
    "enum": "Unsupported value: {shown}: supported values: {supported}",
    "type": "Invalid value: {shown}: must be of type {limit}",
    "anyOf": "Invalid value: {shown}: must be a whole number or a string",
    "pattern": "Invalid value: {shown}: should match '{limit}'",
    "minimum": "Invalid value: {shown}: should be greater than or equal to {limit}",
    "maximum": "Invalid value: {shown}: should be less than or equal to {limit}",
    "maxLength": "Too long: may not be more than {limit} bytes",
    "maxItems": "Too many: must have at most {limit} items",
    "minItems": "Invalid value: {shown}: should have at least {limit} items",
    "maxProperties": "Too many: must have at most {limit} items",
    "minProperties": "Invalid value: {shown}: should have at least {limit} properties",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a manifest is refused. `field` is a path such as spec.slo.ttft; empty for the manifest as a whole."""

    field: str
    message: str

    @override
    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


@dataclass(frozen=True, slots=True)
class Rule:
    """One `x-kubernetes-validations` entry, ready to run."""

    message: str
    field: Path
    program: celpy.Runner

    @classmethod
    def compile(cls, environment: celpy.Environment, entry: Mapping[str, str]) -> Self:
        if "oldSelf" in entry["rule"]:
            raise ValueError(f"transition rules are not interpreted here: {entry['rule']}")
        below = tuple(part for part in entry.get("fieldPath", "").split(".") if part)
        return cls(entry["message"], below, environment.program(environment.compile(entry["rule"])))

    def holds(self, value: Any) -> bool:
        try:
            return bool(self.program.evaluate({"self": json_to_cel(value)}))
        except celpy.evaluation.CELEvalError:
            # As on the API server, a rule that cannot be evaluated refuses.
            return False


@dataclass(frozen=True, slots=True)
class Node:
    """One place in the schema that has CEL rules of its own or below it."""

    rules: tuple[Rule, ...] = ()
    properties: Mapping[str, Node] = field(default_factory=dict)
    items: Node | None = None

    @classmethod
    def compile(cls, environment: celpy.Environment, schema: Mapping[str, Any]) -> Self | None:
        rules = tuple(Rule.compile(environment, entry) for entry in schema.get("x-kubernetes-validations", ()))
        below = {name: cls.compile(environment, sub) for name, sub in schema.get("properties", {}).items()}
        properties = {name: node for name, node in below.items() if node}
        items = cls.compile(environment, schema["items"]) if "items" in schema else None
        if "additionalProperties" in schema and cls.compile(environment, schema["additionalProperties"]):
            raise ValueError("rules on the values of a map are not interpreted here: put them on the map")
        return cls(rules, properties, items) if rules or properties or items else None

    def problems(self, value: Any, at: Path) -> Iterator[Problem]:
        for rule in self.rules:
            if not rule.holds(value):
                yield Problem(_dotted(at + rule.field), f"Invalid value: {_shown(value)}: {rule.message}")
        if isinstance(value, Mapping):
            for name, node in self.properties.items():
                if name in value:
                    yield from node.problems(value[name], (*at, name))
        if self.items and isinstance(value, list):
            for index, item in enumerate(value):
                yield from self.items.problems(item, (*at, index))


class Schemas:
    """Those of all our kinds, each read when it is first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, Schema] = {}

    def of(self, kind: str) -> Schema:
        """Raises KeyError for a kind that is not ours."""
        if kind not in self._found:
            self._found[kind] = Schema(crd.load(kind), crd.VERSION)
        return self._found[kind]


class Schema:
    """The schema of one version of a custom resource definition."""

    def __init__(self, crd: Mapping[str, Any], version: str) -> None:
        [served] = [each for each in crd["spec"]["versions"] if each["name"] == version]
        self._schema: Mapping[str, Any] = served["schema"]["openAPIV3Schema"]
        self._validator = jsonschema.Draft202012Validator(self._schema)
        self._rules = Node.compile(celpy.Environment(), self._schema) or Node()

    def with_defaults(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """A copy with the schema's defaults filled in, as the API server stores it."""
        filled = copy.deepcopy(dict(manifest))
        _fill_defaults(filled, self._schema)
        return filled

    def problems(self, manifest: Mapping[str, Any]) -> tuple[Problem, ...]:
        """Why the API server, or kubectl in front of it, would refuse the manifest; nothing if they would not."""
        unknown = tuple(_unknown_fields(manifest, self._schema, ()))
        if unknown:
            return unknown
        filled = self.with_defaults(manifest)
        errors = list(self._validator.iter_errors(filled))
        found = dict.fromkeys(problem for error in errors for problem in _described(error))
        if not any(error.validator in _BLOCKING for error in errors):
            found |= dict.fromkeys(self._rules.problems(filled, ()))
        return tuple(found)


def _fill_defaults(value: Any, schema: Mapping[str, Any]) -> None:
    if isinstance(value, list):
        for item in value:
            _fill_defaults(item, schema.get("items", {}))
    if not isinstance(value, dict):
        return
    for name, below in schema.get("properties", {}).items():
        if name not in value and "default" in below:
            value[name] = copy.deepcopy(below["default"])
        if name in value:
            _fill_defaults(value[name], below)


def _unknown_fields(value: Any, schema: Mapping[str, Any], at: Path) -> Iterator[Problem]:
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _unknown_fields(item, schema["items"], (*at, index))
    properties = schema.get("properties")
    if not isinstance(value, Mapping) or properties is None:
        return
    for name, below in value.items():
        known = name in _METADATA_FIELDS if at == ("metadata",) else name in properties
        if not known:
            yield Problem(_dotted((*at, name)), "unknown field")
        elif name in properties:
            yield from _unknown_fields(below, properties[name], (*at, name))


def _described(error: jsonschema.ValidationError) -> Iterator[Problem]:
    """A schema error in the words of the API server."""
    at, limit, shown = tuple(error.absolute_path), error.validator_value, _shown(error.instance)
    if error.validator == "required":
        for name in limit:
            if name not in error.instance:
                yield Problem(_dotted((*at, name)), "Required value")
        return
    words = _WORDS.get(error.validator)
    if words is None:
        yield Problem(_dotted(at), f"Invalid value: {shown}: {error.message}")
        return
    supported = ", ".join(map(_shown, limit)) if error.validator == "enum" else ""
    yield Problem(_dotted(at), words.format(shown=shown, limit=limit, supported=supported))


def _dotted(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return '"object"'
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
