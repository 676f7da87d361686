"""How long each step of the story took, for the table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    what: str
    took_s: float
    seen: list[str]


@dataclass
class Story:
    steps: list[Step] = field(default_factory=list)

    @contextmanager
    def step(self, what: str) -> Iterator[list[str]]:
        """The body appends what it saw to what it is given, and may do so later; a body that fails leaves no line."""
        seen: list[str] = []
        began_s = time.monotonic()
        yield seen
        self.steps.append(Step(what, time.monotonic() - began_s, seen))

    def table(self) -> list[str]:
        return [f"{step.took_s:7.1f} s  {step.what:<48} {'; '.join(step.seen)}".rstrip() for step in self.steps]
