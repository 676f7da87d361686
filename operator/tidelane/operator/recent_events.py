"""Events written a while ago: what is said of an object once more counts up the one there is, as kubectl shows it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from tidelane.operator.reports import Report

# The API server forgets Events after an hour; of more than this in that time the oldest count anew.
_LIMIT: Final = 4096


@dataclass(frozen=True, slots=True)
class Written:
    """An Event by its `name`, and how often the same has been said."""

    name: str
    count: int = 1


class RecentEvents:
    """In memory: after a restart the operator says again what it says, as a new Event."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._written: OrderedDict[tuple[str, Report], Written] = OrderedDict()

    def again(self, uid: str, report: Report) -> Written | None:
        """The Event for this report of the object `uid`, counted up; None: there is none."""
        written = self._written.get((uid, report))
        return replace(written, count=written.count + 1) if written else None

    def wrote(self, uid: str, report: Report, written: Written) -> None:
        self._written[uid, report] = written
        self._written.move_to_end((uid, report))
        if len(self._written) > self._limit:
            self._written.popitem(last=False)
