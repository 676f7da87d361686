"""What `tidelane up` prints and writes for scripts."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tidelane.cli.up_display import Display
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef


def service(ready: str = "False", reason: str = "LoadingModel", message: str = "wait", **status: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    return {
        "metadata": {"name": "chat", "namespace": "default", "generation": 1},
        "status": {"conditions": [condition], **status},
    }


class Screen:
    def __init__(self, folder: Path) -> None:
        self._output = io.StringIO()
        self.status_file = folder / "status.json"
        self.display = Display(Console(file=self._output, width=40), self.status_file)

    @property
    def lines(self) -> list[str]:
        return self._output.getvalue().splitlines()


@pytest.fixture
def screen(tmp_path: Path) -> Screen:
    return Screen(tmp_path)


def test_each_change_is_told_once(screen: Screen) -> None:
    screen.display.update([service()])
    screen.display.update([service()])
    screen.display.update([service(goodput="0/s")])
    screen.display.update([])
    assert screen.lines == ["chat: LoadingModel: wait", "chat: gone"]


def test_ready_gives_a_line_to_copy(screen: Screen) -> None:
    screen.display.update([service("True", "Serving", "", endpoint="http://127.0.0.1:1/v1")])
    assert screen.lines[0] == "chat: ready at http://127.0.0.1:1/v1"
    # Whole, though the terminal is narrow.
    words = shlex.split(screen.lines[1])
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "chat"


def test_status_file(screen: Screen) -> None:
    screen.display.update([service()])
    [told] = json.loads(screen.status_file.read_text())["services"]
    assert (told["name"], told["ready"], told["reason"], told["endpoint"]) == ("chat", False, "LoadingModel", None)
    screen.display.update([service("True", "Serving", "", endpoint="http://127.0.0.1:1/v1")])
    [told] = json.loads(screen.status_file.read_text())["services"]
    assert (told["ready"], told["endpoint"]) == (True, "http://127.0.0.1:1/v1")
    assert [path.name for path in screen.status_file.parent.iterdir()] == ["status.json"]


def test_reports_that_status_lines_do_not_cover(screen: Screen) -> None:
    ref = ObjectRef("default", "chat")
    screen.display.report(ref, Report("Ready", "serving"))
    screen.display.report(ref, Report("SLOMissed", "80 % of requests, 99 % wanted", warning=True))
    assert screen.lines == ["chat: SLOMissed: 80 % of requests, 99 % wanted"]


def test_a_policy_is_told_once_it_says_something(screen: Screen) -> None:
    policy: dict[str, Any] = {"metadata": {"name": "gold"}, "spec": {"mode": "DryRun"}}
    screen.display.update([], [{**policy, "status": {"observedGeneration": -1}}])
    assert screen.lines == []
    attainable = {"type": "Attainable", "status": "True", "reason": "WouldMeet", "message": "all of 1"}
    screen.display.update([], [{**policy, "status": {"matched": 1, "changed": 0, "conditions": [attainable]}}])
    assert screen.lines == ["policy gold: matches 1, would change 0; WouldMeet: all of 1"]
