"""Reading public request traces, in the formats of their authors. The files stay with their authors."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from tidelane.engine.bench.traffic import Arrival, Traffic

# Mooncake's trace tells arrivals to the tick.
MOONCAKE_TICK_S = 3.0
# Beyond these a trace is surely broken; the time is that of about 30,000 years in milliseconds.
_MOST_TOKENS: Final = 10_000_000
_LATEST: Final = 1e15


class TraceFormat(StrEnum):
    AZURE = "azure"
    MOONCAKE = "mooncake"
    JSONL = "jsonl"


class BadTrace(ValueError):
    """The file is not a trace that we read; the message names line and field."""


def read_trace(path: Path, form: TraceFormat | None = None) -> Traffic:
    """Time starts at the first arrival. Blank lines are passed over. Without `form`: `.csv` is Azure's, `.jsonl`
    Mooncake's."""
    form = form or _FORMATS.get(path.suffix)
    if form is None:
        raise BadTrace(f"{path}: expected a .csv (Azure) or a .jsonl (Mooncake) file")
    lines: _Lines
    match form:
        case TraceFormat.AZURE:
            lines = _Azure()
        case TraceFormat.MOONCAKE:
            lines = _JsonLines(_mooncake)
        case TraceFormat.JSONL:
            lines = _JsonLines(_plain)
    return _traffic(path, _arrivals(path, lines))


def within_ticks(traffic: Traffic, tick_s: float, seed: int) -> Traffic:
    """Arrivals moved by a random part of the tick that they were rounded down to."""
    draw = random.Random(f"ticks:{seed}")
    moved = [replace(each, at_s=each.at_s + draw.uniform(0.0, tick_s)) for each in traffic.arrivals]
    start_s = min(each.at_s for each in moved)
    arrivals = sorted((replace(each, at_s=each.at_s - start_s) for each in moved), key=lambda each: each.at_s)
    return Traffic(tuple(arrivals), max(1.0, arrivals[-1].at_s))


_FORMATS = {".csv": TraceFormat.AZURE, ".jsonl": TraceFormat.MOONCAKE}


class _Lines(Protocol):
    def read(self, line: str) -> Arrival | None:
        """What a line says; None if it holds no request. Raises ValueError or csv.Error."""
        ...


class _Azure:
    """Columns TIMESTAMP (seconds with seven decimals, no zone), ContextTokens, GeneratedTokens."""

    def __init__(self) -> None:
        self._columns: Sequence[str] = ()

    def read(self, line: str) -> Arrival | None:
        [cells] = csv.reader([line])
        if not self._columns:
            self._columns = cells
            return None
        row = dict(zip(self._columns, cells, strict=False))
        return Arrival(_time_s(row, "TIMESTAMP"), _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))


class _JsonLines:
    """One object a line, of which `parse` knows the fields."""

    def __init__(self, parse: Callable[[Mapping[str, Any]], Arrival]) -> None:
        self._parse = parse

    def read(self, line: str) -> Arrival | None:
        try:
            row = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(row, Mapping):
            raise ValueError("expected an object")
        return self._parse(row)


def _mooncake(row: Mapping[str, Any]) -> Arrival:
    """`timestamp` in milliseconds, `input_length`, `output_length`; `hash_ids` for each 512 tokens of the prompt."""
    blocks = row.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids: expected a list of whole numbers")
    time_ms = _number(row, "timestamp", 0, _LATEST)
    return Arrival(time_ms / 1000, _tokens(row, "input_length"), _tokens(row, "output_length"), hash_ids=tuple(blocks))


def _plain(row: Mapping[str, Any]) -> Arrival:
    """`at_s`, `input_tokens`, `output_tokens`."""
    return Arrival(_number(row, "at_s", 0, _LATEST), _tokens(row, "input_tokens"), _tokens(row, "output_tokens"))


def _arrivals(path: Path, lines: _Lines) -> Iterator[Arrival]:
    # "utf-8-sig" passes over the mark that some editors put first; what is no UTF-8 is refused as what it stands in.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                arrival = lines.read(line)
            except (ValueError, csv.Error) as error:
                raise BadTrace(f"{path}:{number}: {error}") from error
            if arrival is not None:
                yield arrival


def _time_s(row: Mapping[str, str], field: str) -> float:
    text = _given(row, field)
    try:
        # fromisoformat reads at most six decimals.
        return datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise ValueError(f"{field}: {text[:50]!r}, expected a time such as 2024-05-01 10:00:00.5") from error


def _tokens(row: Mapping[str, Any], field: str) -> int:
    return int(_number(row, field, 1, _MOST_TOKENS))


def _number(row: Mapping[str, Any], field: str, least: float, most: float) -> float:
    value = _given(row, field)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not least <= number <= most:  # Nor is it so for NaN.
        raise ValueError(f"{field}: {str(value)[:50]!r}, expected a number from {least:.0f} to {most:.0f}")
    return number


def _given(row: Mapping[str, Any], field: str) -> Any:
    value = row.get(field)
    if value is None:
        raise ValueError(f"{field} is missing")
    return value


def _traffic(path: Path, arrivals: Iterable[Arrival]) -> Traffic:
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    if not ordered:
        raise BadTrace(f"{path}: the trace holds no request")
    moved = [replace(each, at_s=each.at_s - ordered[0].at_s) for each in ordered]
    return Traffic(tuple(moved), max(1.0, moved[-1].at_s))
