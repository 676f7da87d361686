"""Writes docs/inferenceservice.md, every field of the resource in a table, from the CRD; `--check` finds drift."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CRD = ROOT / "crds" / "inferenceservices.yaml"
PAGE = ROOT / "docs" / "inferenceservice.md"

Schema = Mapping[str, Any]


def main(arguments: list[str]) -> int:
    page = render(yaml.safe_load(CRD.read_text(encoding="utf-8")))
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PAGE.relative_to(ROOT)} does not match {CRD.relative_to(ROOT)}: run `make crds`", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def render(crd: Mapping[str, Any]) -> str:
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [
        f"# {crd['spec']['names']['kind']} ({crd['spec']['group']}/{version['name']})",
        "",
        "Made from [the CRD](../crds/inferenceservices.yaml) by `make crds`; edit that.",
    ]
    for part in ("spec", "status"):
        lines += ["", f"## {part}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        lines += rows(schema["properties"][part], part)
        lines += rules(schema["properties"][part], part)
    return "\n".join(lines) + "\n"


def rows(schema: Schema, path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = f"`{field['default']}`" if "default" in field and not isinstance(field["default"], dict) else ""
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        yield f"| `{here}` | {kind(field)} | {default} | {meaning} |"
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


def kind(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    return str(field.get("type", ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
