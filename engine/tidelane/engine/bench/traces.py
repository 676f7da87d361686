"""Reading public request traces, in the formats of their authors. The files stay with their authors."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tidelane.engine.bench.traffic import Arrival, Traffic


class BadTrace(ValueError):
    """The file is not a trace that we read; the message names the line."""


def read_trace(path: Path) -> Traffic:
    """`.csv`: Azure's format; `.jsonl`: Mooncake's. Time starts at the first arrival."""
    if path.suffix == ".csv":
        return _traffic(_azure(path))
    if path.suffix == ".jsonl":
        return _traffic(_mooncake(path))
    raise BadTrace(f"{path}: expected a .csv (Azure) or a .jsonl (Mooncake) file")


def _azure(path: Path) -> list[Arrival]:
    """Columns TIMESTAMP (seconds with seven decimals, no zone), ContextTokens, GeneratedTokens."""
    arrivals = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in (reader := csv.DictReader(file)):
            try:
                # fromisoformat reads at most six decimals.
                time = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
                sizes = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise BadTrace(f"{path}:{reader.line_num}: {error!r}") from error
            arrivals.append(Arrival(time.timestamp(), *sizes))
    return arrivals


def _mooncake(path: Path) -> list[Arrival]:
    """One object a line: `timestamp` in milliseconds, `input_length`, `output_length`. `hash_ids` are not used yet."""
    arrivals = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                arrivals.append(Arrival(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"])))
            except (KeyError, TypeError, ValueError) as error:
                raise BadTrace(f"{path}:{number}: {error!r}") from error
    return arrivals


def _traffic(arrivals: Sequence[Arrival]) -> Traffic:
    if not arrivals:
        raise BadTrace("the trace holds no request")
    start_s = min(each.at_s for each in arrivals)
    moved = [Arrival(each.at_s - start_s, each.input_tokens, each.output_tokens, each.kind) for each in arrivals]
    moved.sort(key=lambda each: each.at_s)
    return Traffic(tuple(moved), max(1.0, moved[-1].at_s))
