"""What `make demo` runs: it ends well, says what it should, and leaves nothing behind however it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = (ROOT / "examples" / "chat.yaml").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Demo:
    """The demo as a process; all its output, lines as they come."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / "tools" / "demo.py"), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"the demo ended without {text!r}:\n{''.join(self.lines)}")

    def end(self) -> int:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines += output
        return self.process.wait()

    @property
    def output(self) -> str:
        return "".join(self.lines)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Whatever a test starts has ended when the test has."""
    before = set(psutil.Process().children(recursive=True))  # the API server of other tests, say
    yield
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child not in before and child.status() != psutil.STATUS_ZOMBIE
    ]
    names = [child.cmdline() for child in left]
    for child in left:
        child.kill()
    assert names == []


def cells(output: str, row: str) -> Sequence[str]:
    line = next(line for line in output.splitlines() if re.match(rf"│ {row} +│", line))
    return [cell.strip() for cell in line.split("│")[2:-1]]


@pytest.mark.usefixtures("nothing_left")
def test_the_demo_answers_and_measures() -> None:
    demo = Demo("--seconds", "6")
    assert demo.end() == 0, demo.output
    assert "Paris" in demo.output
    sent = int(cells(demo.output, "requests")[0])
    assert sent > 0
    assert cells(demo.output, "failed")[0] == "0"
    assert re.fullmatch(r"[\d.]+ m?s", cells(demo.output, "TTFT p99")[0])
    assert re.fullmatch(r"\d+%", cells(demo.output, "within targets")[0])
    assert re.fullmatch(r"\d+% of the time", cells(demo.output, "decode alone")[0])
    assert "Stopped, with nothing left running." in demo.output


@pytest.mark.usefixtures("nothing_left")
def test_an_interrupt_stops_everything() -> None:
    demo = Demo("--seconds", "60")
    demo.until("requests")  # the traffic has begun
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.output
    assert "Interrupted; everything is stopped." in demo.output


@pytest.mark.usefixtures("nothing_left")
def test_a_service_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(re.sub("builtin://.*", f"file://{tmp_path}/model", MANIFEST))
    demo = Demo("--manifest", str(manifest))
    assert demo.end() == 1, demo.output
    assert "The demo failed:" in demo.output
    assert f"{tmp_path}/model/config.json" in demo.output.replace("\n", "")


def test_an_unknown_model_is_told(tmp_path: Path) -> None:
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(re.sub("builtin://.*", "builtin://no-such", MANIFEST))
    demo = Demo("--manifest", str(manifest))
    assert demo.end() == 1
    assert "unknown built-in model 'no-such'" in demo.output
