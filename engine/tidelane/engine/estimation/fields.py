"""Strict reading of JSON that people may have edited: each error names the file, the field and what it must be."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

LARGEST = sys.float_info.max  # JSON's integers have no end, and its numbers may be Infinity or NaN


class WrongField(ValueError):
    """Change the file where the message says."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value and where it stands: `file`, and `path` within, as in times.decode.16.knots[2]."""

    file: str
    path: str
    value: object

    def wrong(self, must: str) -> WrongField:
        return WrongField(f"{self.file}: {self.path or 'the file'} {must}")

    def members(self, names: frozenset[str], optional: frozenset[str] = frozenset()) -> dict[str, Field]:
        """An object of exactly these fields; the optional ones may be missing."""
        found = dict(self.items())
        if missing := names - found.keys():
            raise self._at(min(missing), None).wrong("is missing: add it")
        if unknown := found.keys() - names - optional:
            raise found[min(unknown)].wrong("is not a field that we know: remove it")
        return found

    def items(self) -> Iterator[tuple[str, Field]]:
        """An object's fields, whatever their names."""
        if not isinstance(self.value, dict):
            raise self.wrong("must be an object")
        for name, value in self.value.items():
            yield name, self._at(name, value)

    def elements(self) -> list[Field]:
        if not isinstance(self.value, list):
            raise self.wrong("must be a list")
        return [Field(self.file, f"{self.path}[{at}]", value) for at, value in enumerate(self.value)]

    def number(self, at_least: float = 0.0) -> float:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value <= LARGEST:
            raise self.wrong(f"must be a number of at least {at_least:g}, not {value!r}")
        return float(value)

    def integer(self, at_least: int = 0) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.wrong(f"must be an integer of at least {at_least}, not {value!r}")
        return value

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong(f"must be a text, not {self.value!r}")
        return self.value

    def _at(self, name: str, value: object) -> Field:
        return Field(self.file, f"{self.path}.{name}" if self.path else name, value)


def parse(file: str, text: str) -> Field:
    """The whole of a JSON file. Raises WrongField if it is none, or if an object names a field twice."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise WrongField(f"{file}: {twice} is given twice: remove one")
        return dict(pairs)

    try:
        return Field(file, "", json.loads(text, object_pairs_hook=once))
    except WrongField:
        raise
    except (ValueError, RecursionError) as error:  # ValueError also of an integer of thousands of digits
        raise WrongField(f"{file}: is not JSON ({error})") from error
