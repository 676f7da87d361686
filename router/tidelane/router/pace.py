"""How TTFT has come out at a backend, as a factor on what was predicted. Frozen; `now_s` is an argument.

Predictions count prompt tokens and nothing else: not what decode takes from prefill, nor the machine's mood. Forgotten
with time, or a backend that was slow once would get no request that could show that it no longer is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

RATE: Final = 0.2
HALF_LIFE_S: Final = 30.0
# Of one measurement and of the factor: a stall must not shut a backend out.
LARGEST: Final = math.log(4.0)
# Below it the answer's way takes as long as the prompt.
LEAST_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Pace:
    log: float = 0.0
    at_s: float = 0.0

    def factor(self, now_s: float) -> float:
        return math.exp(self._log(now_s))

    def measured(self, predicted_s: float, ttft_s: float, now_s: float) -> Pace:
        """`predicted_s` is without a pace."""
        ratio = math.log(max(LEAST_S, ttft_s) / max(LEAST_S, predicted_s))
        bounded = min(max(ratio, -LARGEST), LARGEST)
        before = self._log(now_s)
        return Pace(before + RATE * (bounded - before), now_s)

    def _log(self, now_s: float) -> float:
        return self.log * math.exp2(-max(0.0, now_s - self.at_s) / HALF_LIFE_S)
