"""Reading a Tidelane server's `/metrics`: its targets in force, and what its lanes did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tidelane.engine.bench.http_stream import Target, exchange
from tidelane.engine.slo import Slo

_LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """One reading of `/metrics`, with the prefix taken off the names."""

    samples: tuple[Sample, ...]

    @staticmethod
    def parse(text: str) -> Exposition:
        found = (_LINE.fullmatch(line) for line in text.splitlines() if line.startswith("tidelane_"))
        return Exposition(
            tuple(
                Sample(match[1].removeprefix("tidelane_"), dict(_LABEL.findall(match[2] or "")), float(match[3]))
                for match in found
                if match is not None
            )
        )

    def value(self, name: str, **labels: str) -> float | None:
        """The first sample of that name and labels."""
        wanted = labels.items()
        return next((s.value for s in self.samples if s.name == name and wanted <= s.labels.items()), None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of `name` by one of their labels."""
        return {s.labels[label]: s.value for s in self.samples if s.name == name}

    def slo(self, percentile: int) -> Slo | None:
        """The targets in force; None for a server that tells none."""
        targets = self.by("slo_target_seconds", "target")
        if not targets:
            return None
        return Slo(targets["ttft"], targets["tpot"], targets["ttft_per_1k_input_tokens"], percentile)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What a device did between two readings: seconds by kind of use, and moves of the border, by where it went."""

    busy_s: Mapping[str, float]
    moves: float
    moves_to: Mapping[str, float]

    @staticmethod
    def between(before: Exposition, after: Exposition) -> LaneUse:
        return LaneUse(
            _growth(before, after, "lane_busy_seconds_total", "kind"),
            (after.value("lane_switches_total") or 0.0) - (before.value("lane_switches_total") or 0.0),
            _growth(before, after, "lane_switches_to_total", "border"),
        )

    def share(self, kind: str) -> float:
        """Part of the time, 0 to 1."""
        total_s = sum(self.busy_s.values())
        return self.busy_s.get(kind, 0.0) / total_s if total_s else 0.0


def _growth(before: Exposition, after: Exposition, name: str, label: str) -> dict[str, float]:
    start = before.by(name, label)
    return {key: value - start.get(key, 0.0) for key, value in after.by(name, label).items()}


async def read_metrics(url: str) -> Exposition:
    """Raises OSError when the server cannot be reached; empty when it has no metrics of ours."""
    async with exchange(Target.parse(url), "GET", "/metrics") as answer:
        body = await answer.body()
        return Exposition.parse(body.decode() if answer.status == 200 else "")
