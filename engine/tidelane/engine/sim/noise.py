"""Run-to-run variation of step times."""

from __future__ import annotations

import math
import random


class Noise:
    """Factors around 1, log-normal with mean 1: a step is at times much longer than usual, never much shorter."""

    def __init__(self, sigma: float, seed: str) -> None:
        self._sigma = sigma
        self._draw = random.Random(seed)

    def factor(self) -> float:
        if not self._sigma:
            return 1.0
        return math.exp(self._draw.gauss(-self._sigma * self._sigma / 2, self._sigma))
