"""The chart's parts that need no helm: templates of CRDs, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools.chart import CRDS, TEMPLATES, WrongCrdError, template

from tidelane.engine.http.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "charts" / "tidelane" / "dashboards" / "tidelane.json"
CRD = "kind: CustomResourceDefinition\nmetadata:\n  name: lanes\nspec: {}\n"


def test_every_crd_has_its_template() -> None:
    assert {path.name for path in TEMPLATES.glob("*.yaml")} == {path.name for path in CRDS.glob("*.yaml")}


def test_a_template_is_the_crd_with_annotations_behind_a_switch() -> None:
    lines = template("lanes.yaml", CRD).splitlines()
    added = [line for line in lines if line not in CRD.splitlines()]
    assert [line for line in lines if line not in added] == CRD.splitlines()
    assert [line.partition("{{- ")[2].split()[0] for line in added] == ["/*", "if", "include", "end"]
    assert lines.index(added[2]) == lines.index("metadata:") + 1


@pytest.mark.parametrize(
    ("crd", "said"),
    [
        (CRD + "# {{ here }}\n", "instruction"),
        (CRD.replace("  name", "  annotations: {a: b}\n  name"), "without annotations"),
        (CRD + "---\n" + CRD, "one CRD"),
    ],
)
def test_a_crd_that_helm_would_change_is_refused(crd: str, said: str) -> None:
    with pytest.raises(WrongCrdError, match=f"crds/lanes.yaml.*{said}"):
        template("lanes.yaml", crd)


def test_the_dashboard_asks_for_figures_that_the_engine_has() -> None:
    asked = set(re.findall(r"tidelane_\w+", DASHBOARD.read_text()))
    # The loop's own are there only with a heartbeat.
    source = Path(str(Metrics.__init__.__code__.co_filename)).read_text()
    shown = set(re.findall(r"^(tidelane_\w+)", Metrics("m", lambda: None).exposition().decode(), re.MULTILINE))
    shown |= {f"tidelane_{name}" for name in re.findall(r'_gauge\("(\w+)"', source)}
    assert len(asked) >= 8
    assert asked - shown == set()


def test_every_panel_can_be_drawn() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["expr"].count("(") == target["expr"].count(")") for p in panels for target in p["targets"])
