"""When a backend that fails requests is left alone, and for how long: frozen values, `now_s` an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

# In a row: one may be the fault of the request.
FAILURES_TO_EJECT: Final = 3
FIRST_EJECTION_S: Final = 1.0
LONGEST_EJECTION_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Record:
    """How requests fared at one backend lately. Each ejection without a success since the last is twice as long."""

    failures: int = 0  # in a row
    ejections: int = 0  # since the last success
    until_s: float | None = None

    def failed(self, now_s: float) -> Record:
        if self.ejected(now_s):  # by requests that were on their way when it was ejected
            return self
        # Once ejected, the first failure after it is enough: nothing says that it has recovered.
        if self.failures + 1 < FAILURES_TO_EJECT and not self.ejections:
            return replace(self, failures=self.failures + 1)
        for_s = min(LONGEST_EJECTION_S, FIRST_EJECTION_S * 2.0**self.ejections)
        return Record(0, self.ejections + 1, now_s + for_s)

    def succeeded(self) -> Record:
        return HEALTHY

    def ejected(self, now_s: float) -> bool:
        return self.until_s is not None and now_s < self.until_s


HEALTHY: Final = Record()
