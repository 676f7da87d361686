"""Writes the chart's templates of the CRDs from crds/; `--check` finds drift.

They are templates and not in the chart's own crds/ folder, from which helm installs but never upgrades.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CRDS = ROOT / "crds"
TEMPLATES = ROOT / "charts" / "tidelane" / "templates" / "crds"

_HEAD = "{{- /* Made from crds/ by `make crds`; edit that. */}}\n{{- if .Values.crds.install }}\n"
_TAIL = "{{- end }}\n"
_METADATA = "\nmetadata:\n"
_ANNOTATIONS = '  {{- include "tidelane.crd.annotations" . | nindent 2 }}\n'


class WrongCrdError(Exception):
    """Says what to change in which file."""


def main(arguments: list[str]) -> int:
    try:
        wanted = {path.name: template(path.name, path.read_text(encoding="utf-8")) for path in CRDS.glob("*.yaml")}
    except WrongCrdError as error:
        print(error, file=sys.stderr)
        return 1
    found = {path.name: path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.yaml")}
    if arguments == ["--check"]:
        if found == wanted:
            return 0
        print(f"{TEMPLATES.relative_to(ROOT)} does not match crds/: run `make crds`", file=sys.stderr)
        return 1
    for name in found.keys() - wanted.keys():
        (TEMPLATES / name).unlink()
    for name, text in wanted.items():
        (TEMPLATES / name).write_text(text, encoding="utf-8")
    return 0


def template(name: str, crd: str) -> str:
    """The text as it is, but for annotations: helm would write large numbers of parsed YAML as 1e+06."""
    if "{{" in crd:
        raise WrongCrdError(f"crds/{name}: helm would take {{{{ for an instruction; say it without")
    if crd.count(_METADATA) != 1 or "annotations" in yaml.safe_load(crd)["metadata"]:
        raise WrongCrdError(f"crds/{name}: needs one CRD with metadata of its own, without annotations")
    return _HEAD + crd.replace(_METADATA, _METADATA + _ANNOTATIONS) + _TAIL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
