"""What reports say of their command: what decided about the figures, and not where they went."""

from __future__ import annotations

import pytest

from tidelane.cli.traces import without_outputs


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("kv-bench --rounds 3 --json a.json", "kv-bench --rounds 3"),
        ("simulate --json a.json --tune 3 --html=b.html --processes 2", "simulate --tune 3"),
        ("simulate --json= --tune 3", "simulate --tune 3"),
    ],
)
def test_a_command_is_told_without_its_outputs(words: str, left: str) -> None:
    assert list(without_outputs(words.split())) == left.split()
