"""Small charts as SVG within HTML: lines and stacked areas, drawn by hand.

Colours are those of Okabe and Ito, which the colour-blind tell apart; the rest is drawn in the text's own colour, so
charts suit light pages and dark ones. Each chart says in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 42
_TICKS = 5
_DASHES = ' stroke-dasharray="5 3"'

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[Point]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """`heights` over the common x of a stack."""

    name: str
    heights: Sequence[float]
    colour: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, both shown; `log`: by powers of 10, from above 0."""

    label: str
    low: float
    high: float
    log: bool = False

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1)]
        step = _round_step((self.high - self.low) / _TICKS)
        first_tick = math.ceil(self.low / step - 1e-9)
        last_tick = math.floor(self.high / step + 1e-9)
        return [step * number for number in range(first_tick, last_tick + 1)]


def linear_axis(label: str, values: Sequence[float]) -> Axis:
    """From 0 to just above the largest of `values`."""
    top = max(values, default=0.0) or 1.0
    step = _round_step(top / _TICKS)
    return Axis(label, 0.0, step * math.ceil(top / step - 1e-9))


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """Whole powers of 10 around those of `values` that are above 0."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(low + 1, math.ceil(math.log10(max(positive)) - 1e-9))
    return Axis(label, 10.0**low, 10.0**high, log=True)


def line_chart(
    title: str, description: str, lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[Line] = ()
) -> str:
    """`marks` are thin lines to compare with: a target, a bound."""
    body = [_frame(x, y)]
    body += [_path(mark, x, y, 'class="mark"') for mark in marks]
    for line in lines:
        dashes = _DASHES if line.dashed else ""
        kind = "line dot" if len(line.points) == 1 else "line"
        body.append(_path(line, x, y, f'class="{kind}" stroke="{line.colour}"{dashes}'))
    return _figure(title, description, body, [(each.name, each.colour, each.dashed) for each in lines])


def stacked_chart(title: str, description: str, at: Sequence[float], areas: Sequence[Area], x: Axis, y: Axis) -> str:
    """Each of `areas` on top of those before it."""
    body = [_frame(x, y)]
    floor = [0.0] * len(at)
    for area in areas:
        top = [low + height for low, height in zip(floor, area.heights, strict=True)]
        outline = [*zip(at, top, strict=True), *reversed(list(zip(at, floor, strict=True)))]
        points = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in outline)
        body.append(f'<polygon points="{points}" fill="{area.colour}"/>')
        floor = top
    return _figure(title, description, body, [(each.name, each.colour, False) for each in areas])


def _figure(title: str, description: str, body: Sequence[str], legend: Sequence[tuple[str, str, bool]]) -> str:
    keys = "".join(
        f'<li><svg width="26" height="10" aria-hidden="true"><path d="M1 5H25" stroke="{colour}" stroke-width="3"'
        f"{_DASHES if dashed else ''}/></svg>{escape(name)}</li>"
        for name, colour, dashed in legend
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}">'
        f"{''.join(body)}</svg><ul>{keys}</ul></figure>"
    )


def _frame(x: Axis, y: Axis) -> str:
    parts = []
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(tick)}</text>')
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(
        f'<text x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 {middle_y})">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)


def _path(line: Line, x: Axis, y: Axis, attributes: str) -> str:
    points = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in line.points)
    if len(line.points) == 1:  # a line of one point would not be seen
        points = f"{points} {points}"
    return f'<polyline {attributes} points="{points}"><title>{escape(line.name)}</title></polyline>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.part(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.part(value) * (HEIGHT - _TOP - _BOTTOM)


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of 10, no smaller than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= step * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:.4g}"
