"""Numbers on the command line: each is finite and in range, or argparse tells what was expected instead."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Final

# Beyond it no timer is meant, and some of those that take it overflow.
_LONGEST_S: Final = 365 * 24 * 3600.0


def seconds(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= _LONGEST_S, f"seconds, from 0 to {_LONGEST_S:.0f}")


def positive_seconds(text: str) -> float:
    return _number(text, lambda value: 0 < value <= _LONGEST_S, f"seconds, above 0 and at most {_LONGEST_S:.0f}")


def positive(text: str) -> float:
    return _number(text, lambda value: value > 0, "a number above 0")


def not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, "a number, 0 or more")


def count(text: str) -> int:
    return _whole(text, range(1 << 63), "a whole number, 0 or more")


def count_from_1(text: str) -> int:
    return _whole(text, range(1, 1 << 31), "a whole number, 1 or more")


def percentile(text: str) -> int:
    return _whole(text, range(1, 100), "a whole number from 1 to 99")


def port(text: str) -> int:
    return _whole(text, range(1, 1 << 16), "a whole number from 1 to 65535")


def _number(text: str, in_range: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and in_range(value)):
        raise argparse.ArgumentTypeError(f"{text!r} must be {expected}")
    return value


def _whole(text: str, allowed: range, expected: str) -> int:
    # int() would also take "1_0", " 1" and "²", and refuses more than 4,300 digits in words of its own.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(allowed.stop)) and int(text) in allowed):
        raise argparse.ArgumentTypeError(f"{text!r} must be {expected}")
    return int(text)
