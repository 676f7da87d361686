"""`tidelane serve` as a command: options that have no effect alone are refused before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tidelane.cli import main

ADD = "is of KV below the device: add --kv-host-memory or --kv-disk-memory"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--kv-prefetch",), f"--kv-prefetch: {ADD}"),
        (("--kv-dtype", "int8"), f"--kv-dtype: {ADD}"),
        (("--kv-disk-memory", "99", "--kv-prefetch"), "--kv-disk-memory: name a folder for it with --kv-disk-folder"),
    ],
)
def test_what_has_no_effect_alone_is_refused_in_one_line(
    words: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", "--model", "builtin://x", *words]) == os.EX_CONFIG
    assert capsys.readouterr().err == f"tidelane serve: {told}\n"
