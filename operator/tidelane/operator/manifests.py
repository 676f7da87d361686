"""YAML text to validated manifests of services and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml
from typing_extensions import override

from tidelane.operator.crd import API_VERSION, CLUSTER_WIDE, KIND, POLICY_KIND
from tidelane.operator.resources import ObjectRef
from tidelane.operator.validation import Problem, Schemas

KINDS: Final = (KIND, POLICY_KIND)


class ManifestError(Exception):
    """A file holds something that cannot be applied: the user must change it. The text has one problem a line."""

    def __init__(self, origin: str, document: int, problems: tuple[Problem, ...]) -> None:
        self.origin, self.document, self.problems = origin, document, problems
        where = f"{origin}, document {document}" if document else origin
        super().__init__("\n".join(f"{where}: {problem}" for problem in problems))


@dataclass(frozen=True, slots=True)
class Document:
    """One manifest of a file, valid and with defaults. `index` counts the file's documents from 1."""

    origin: str
    index: int
    manifest: Mapping[str, Any]

    @property
    def kind(self) -> str:
        kind: str = self.manifest["kind"]
        return kind

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef.of(self.manifest)


def read_manifests(text: str, origin: str, schemas: Schemas) -> list[Document]:
    """Every service and policy in the text. Raises ManifestError at the first document that is refused."""
    documents = []
    for index, manifest in enumerate(_parsed(text, origin), start=1):
        if manifest is None:
            continue
        problems: Sequence[Problem] = _kind_problems(manifest) or _metadata_problems(manifest)
        if problems:
            raise ManifestError(origin, index, tuple(problems))
        schema = schemas.of(manifest["kind"])
        if problems := schema.problems(manifest):
            raise ManifestError(origin, index, tuple(problems))
        documents.append(Document(origin, index, schema.with_defaults(manifest)))
    return documents


def _parsed(text: str, origin: str) -> Iterator[Any]:
    try:
        yield from yaml.load_all(text, Loader=_StrictLoader)
    except (yaml.YAMLError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        # Besides its own errors PyYAML lets through what converting a scalar or hashing a key raises, and its depth.
        raise ManifestError(origin, 0, (Problem("", f"not YAML: {error}"),)) from error


def _kind_problems(manifest: Any) -> list[Problem]:
    if not isinstance(manifest, Mapping):
        return [Problem("", "must be a mapping with apiVersion, kind, metadata and spec")]
    if manifest.get("apiVersion") != API_VERSION or manifest.get("kind") not in KINDS:
        found = f"{manifest.get('kind')} of {manifest.get('apiVersion')}"
        return [Problem("kind", f"{found}: only {' and '.join(KINDS)} of {API_VERSION} are known")]
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping) or not metadata.get("name"):
        return [Problem("metadata.name", "Required value: name or generateName is required")]
    return []


def _metadata_problems(manifest: Mapping[str, Any]) -> list[Problem]:
    metadata = manifest["metadata"]
    problems = [
        Problem(f"metadata.{field}", "Invalid value: must be strings by name")
        for field in ("labels", "annotations")
        if not all(isinstance(value, str) for value in (metadata.get(field) or {}).values())
    ]
    namespace = metadata.get("namespace", "default")
    if manifest["kind"] in CLUSTER_WIDE:
        return problems
    if not (isinstance(namespace, str) and namespace.replace("-", "").isalnum() and namespace == namespace.lower()):
        problems.append(Problem("metadata.namespace", "Invalid value: must be a DNS label"))
    return problems


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice and a node within itself, as kubectl does.

    Dates stay the strings that they are in Kubernetes.
    """

    @override
    def construct_document(self, node: yaml.Node) -> Any:
        # What it meets inside itself is then refused with its line; else it would be built, and never be walked to its
        # end.
        self.deep_construct = True
        return super().construct_document(node)

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
