"""The `tidelane` command: help, unknown words, and parts that are not installed."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

from tidelane.cli import main


def test_help_names_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("up", "agent", "operator"))


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["upp"])
    assert ended.value.code == 2
    assert "invalid choice: 'upp'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "operator", "agent"])
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: tidelane {command}" in capsys.readouterr().out


def test_what_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_kopf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "kopf":
            raise ModuleNotFoundError("No module named 'kopf'", name="kopf")
        return real(name, *args, **kwargs)

    for module in ("tidelane.cli.operator", "tidelane.operator.handlers", "kopf"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", without_kopf)
    assert main.main(["operator", "--agents", "x:1"]) == 1
    assert "pip install 'tidelane[operator]'" in capsys.readouterr().err


def test_starting_up_and_the_operator_load_no_torch() -> None:
    code = (
        "import sys, tidelane.cli.main, tidelane.cli.up, tidelane.cli.operator;"
        "print([name for name in ('torch', 'transformers', 'tidelane.agent') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
