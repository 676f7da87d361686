"""Writes docs/resources.md, every field of every resource in tables, from the CRDs; `--check` finds drift."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

ROOT = Path(__file__).parents[1]
CRDS = ROOT / "crds"
PAGE = ROOT / "docs" / "resources.md"

# In the order in which people meet them.
_FILES: Final = ("inferenceservices.yaml", "slopolicies.yaml", "modelprofiles.yaml")

Schema = Mapping[str, Any]


def main(arguments: list[str]) -> int:
    left_out = {path.name for path in CRDS.glob("*.yaml")} - set(_FILES)
    if left_out:
        print(f"tools/resources_doc.py does not know {', '.join(sorted(left_out))}: add it there", file=sys.stderr)
        return 1
    page = render([(name, yaml.safe_load((CRDS / name).read_text(encoding="utf-8"))) for name in _FILES])
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PAGE.relative_to(ROOT)} does not match {CRDS.relative_to(ROOT)}/: run `make crds`", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def render(crds: list[tuple[str, Mapping[str, Any]]]) -> str:
    kinds = [crd["spec"]["names"]["kind"] for _, crd in crds]
    lines = [
        "# Resources",
        "",
        f"{', '.join(kinds)}. Made from their schemas in [`crds/`](../crds/) by `make crds`; edit those.",
        "How policies are used: [slo-policy.md](slo-policy.md).",
    ]
    for name, crd in crds:
        lines += ["", *of_kind(name, crd)]
    return "\n".join(lines) + "\n"


def of_kind(name: str, crd: Mapping[str, Any]) -> Iterator[str]:
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    scope = "cluster-wide" if crd["spec"]["scope"] == "Cluster" else "in a namespace"
    yield f"## {names['kind']} ({crd['spec']['group']}/{version['name']})"
    yield ""
    yield meaning(schema)
    yield ""
    yield f"{scope.capitalize()}; short name `{names['shortNames'][0]}`; [schema](../crds/{name})."
    for part in ("spec", "status"):
        if part in schema["properties"]:
            yield from [
                "",
                f"### {names['kind']}: {part}",
                "",
                "| field | type | default | meaning |",
                "|---|---|---|---|",
            ]
            yield from rows(schema["properties"][part], part)
            yield from rules(schema["properties"][part], part)


def rows(schema: Schema, path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = f"`{field['default']}`" if "default" in field and not isinstance(field["default"], dict) else ""
        yield f"| `{here}` | {kind(field)} | {default} | {meaning(field)} |"
        yield from rows(field, here)
        yield from rows(field.get("items", {}), f"{here}[]")


def rules(schema: Schema, path: str) -> list[str]:
    found = list(cel(schema, path))
    return ["", "Rules:", "", *found] if found else []


def cel(schema: Schema, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"- `{path}`: {rule.get('message', rule['rule'])}"
    for name, field in schema.get("properties", {}).items():
        yield from cel(field, f"{path}.{name}")
    if "items" in schema:
        yield from cel(schema["items"], f"{path}[]")


def meaning(field: Schema) -> str:
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


def kind(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "additionalProperties" in field:
        return f"map of {field['additionalProperties']['type']}s"
    return str(field.get("type", ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
