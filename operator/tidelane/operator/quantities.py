"""Durations and amounts of memory as the resources write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
_DURATION_PART = re.compile(r"([0-9]+)(ms|h|m|s)")
_MILLISECONDS: Final[Mapping[str, int]] = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}

_MEMORY = re.compile(r"([0-9]{1,15})(k|M|G|T|Ki|Mi|Gi|Ti)?")
_FACTORS: Final[Mapping[str | None, int]] = {
    None: 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def parse_duration_s(text: str) -> float:
    """Seconds of a duration in the form of GEP-2257, such as 1h30m or 200ms."""
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is no duration such as 200ms or 1s500ms")
    return sum(int(count) * _MILLISECONDS[unit] for count, unit in _DURATION_PART.findall(text)) / 1000


def format_duration(duration_s: float) -> str:
    """The same, written with the fewest units, to the millisecond."""
    rest = round(duration_s * 1000)
    parts = []
    for unit, size in _MILLISECONDS.items():
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_memory(quantity: str | int) -> int:
    """Bytes of a Kubernetes quantity without fractions, such as 8Gi."""
    match = _MEMORY.fullmatch(str(quantity))
    if not match:
        raise ValueError(f"{quantity!r} is no amount of memory such as 8Gi")
    return int(match[1]) * _FACTORS[match[2]]
