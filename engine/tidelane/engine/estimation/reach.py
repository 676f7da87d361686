"""What targets are within reach at all: one request alone on the device, by prediction."""

from __future__ import annotations

from dataclasses import dataclass

from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import decode_work, prefill_work


@dataclass(frozen=True, slots=True)
class Reach:
    """Of a prompt of `input_tokens` tokens, nothing of it in the KV cache: no schedule gives it better than this."""

    input_tokens: int
    ttft_s: float
    tpot_s: float


def reach(estimates: Estimates, decode_units: int, prefill_units: int, input_tokens: int) -> Reach:
    """With so many units for its decode steps and for its prefill: all there are, where the two share them."""
    return Reach(
        input_tokens,
        estimates.seconds(Phase.PREFILL, prefill_units, prefill_work([(0, input_tokens)])),
        estimates.seconds(Phase.DECODE, decode_units, decode_work(1, input_tokens)),
    )
