"""A figure as the ratio of two measurements of one run: what stays comparable on any machine, and on a noisy one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Measured:
    """One side of a ratio: a sample from each round, in the order they were taken."""

    name: str
    samples: tuple[float, ...]
    unit: str

    @property
    def middle(self) -> float:
        return median(self.samples)

    @override
    def __str__(self) -> str:
        return f"{self.name} {self.middle:.4g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """`over` divided by `under`, wanted at least `at_least` or at most `at_most`.

    `price` is what it cost, to be read beside it.
    """

    name: str
    over: Measured
    under: Measured
    at_least: float | None = None
    at_most: float | None = None
    price: str = ""

    @property
    def value(self) -> float:
        return self.over.middle / self.under.middle

    @property
    def met(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @override
    def __str__(self) -> str:
        want = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        price = f" [{self.price}]" if self.price else ""
        verdict = "ok" if self.met else "MISS"
        return f"{self.name}: {self.value:.3g} ({self.over}, {self.under}; want {want}): {verdict}{price}"


Sampler = Callable[[], float]


def interleaved(first: Sampler, second: Sampler, rounds: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Samples of both, taken in turns, so that whatever else the machine does falls on both alike."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
