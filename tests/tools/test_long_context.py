from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.long_context import main

from tidelane.cli.targets import BadOption


def test_a_few_thousand_tokens_stream_through_a_twentieth_of_their_room(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--tokens", "4100", "--new-tokens", "3", "--layers", "2", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    # Two buffers of 64 tokens, and a chunk of as many with a block beside it.
    assert (figures["pool_tokens"], figures["tokens"]) == (208, 4100)
    assert figures["pool_share"] < 0.06
    assert figures["all_finite"]
    assert figures["needle_weight"] == pytest.approx(0.9, abs=1e-3)
    for query in ("needle", "diffuse"):
        assert figures[query]["largest_error"] < 2e-5 < figures[query]["largest_value"]
    # 256 full blocks of 16 tokens, two layers, keys and values of 16 numbers in 4 bytes.
    assert figures["bytes_per_step"] == 256 * 16 * 2 * 2 * 16 * 4


def test_a_context_that_would_fit_is_refused() -> None:
    with pytest.raises(BadOption, match="make it 2048 or more"):
        main(["--tokens", "2047"])
