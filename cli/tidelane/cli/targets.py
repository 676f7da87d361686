"""Targets on the command line: `--slo ttft=200ms,ttftPer1k=100ms,tpot=50ms`."""

from __future__ import annotations

from tidelane.engine.slo import Slo
from tidelane.operator.quantities import parse_duration_s

EXAMPLE = "ttft=200ms,ttftPer1k=100ms,tpot=50ms"
_TARGETS = ("ttft", "ttftPer1k", "tpot", "maxTokenGap")


class BadOption(ValueError):
    """The message says which option to change, and how."""


def parse_slo(text: str, percentile: int = 99) -> Slo:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in _TARGETS:
            raise BadOption(f"--slo: {part!r} is no target: write {EXAMPLE}")
        found[name] = duration_s("--slo", value)
    for name in ("ttft", "tpot"):
        if name not in found:
            raise BadOption(f"--slo: {name} is missing: write {EXAMPLE}")
    try:
        return Slo(
            ttft_s=found["ttft"],
            tpot_s=found["tpot"],
            ttft_per_1k_input_tokens_s=found.get("ttftPer1k", 0.0),
            percentile=percentile,
            max_token_gap_s=found.get("maxTokenGap"),
        )
    except ValueError as error:
        raise BadOption(f"--slo: {error}") from error


def duration_s(option: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise BadOption(f"{option}: {error}") from error
