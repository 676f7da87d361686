"""Targets, verdicts and goodput: what it means for a request to be on time.

Terms and conventions: TTFT, time to first token, from arrival at the HTTP front to the first token; TPOT, time per
output token, the mean gap after the first token, which counts as 0 for a request with at most one output token (the
convention of vLLM's benchmark, so that figures compare). Goodput counts only requests that meet both (DistServe,
arXiv 2401.09670). Standard library only: operator and agent import this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a service, or of one request.

    `ttft_per_1k_input_tokens_s` is the allowance by prompt length: no policy prefills 7,000 tokens as fast as 100.
    `max_token_gap_s` bounds the longest wait between two tokens; None: unbounded.
    """

    ttft_s: float
    tpot_s: float
    ttft_per_1k_input_tokens_s: float = 0.0
    percentile: int = 99
    max_token_gap_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ValueError("ttft_s and tpot_s must be above 0")
        if self.ttft_per_1k_input_tokens_s < 0:
            raise ValueError("ttft_per_1k_input_tokens_s must not be negative")
        if not 0 < self.percentile < 100:
            raise ValueError("percentile must lie between 1 and 99")

    def ttft_target_s(self, input_tokens: int) -> float:
        """TTFT target for a prompt of `input_tokens` tokens."""
        return self.ttft_s + self.ttft_per_1k_input_tokens_s * input_tokens / 1000

    def for_request(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        """These targets, a request's own in their stead. Its own TTFT is meant as it stands: no allowance by length."""
        return replace(
            self,
            ttft_s=self.ttft_s if ttft_s is None else ttft_s,
            ttft_per_1k_input_tokens_s=self.ttft_per_1k_input_tokens_s if ttft_s is None else 0.0,
            tpot_s=self.tpot_s if tpot_s is None else tpot_s,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """When one finished request did what; all times from one monotonic clock, in seconds."""

    arrival_s: float
    prefill_start_s: float
    first_token_s: float
    last_token_s: float
    input_tokens: int
    output_tokens: int
    longest_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """The part of TTFT spent waiting for prefill to start."""
        return self.prefill_start_s - self.arrival_s

    @property
    def prefill_s(self) -> float:
        """The rest of TTFT: from the start of prefill to the first token."""
        return self.first_token_s - self.prefill_start_s

    @property
    def tpot_s(self) -> float:
        if self.output_tokens <= 1:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        gap_ok = slo.max_token_gap_s is None or self.longest_gap_s <= slo.max_token_gap_s
        return gap_ok and self.ttft_s <= slo.ttft_target_s(self.input_tokens) and self.tpot_s <= slo.tpot_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile: the smallest value with at least `percent` per cent of `values` at or below it.

    Raises ValueError on no values: a percentile of nothing is not 0.
    """
    if not values:
        raise ValueError("percentile of no values")
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Attainment:
    """How a set of requests fared against the targets, over `window_s` seconds of arrivals."""

    requests: int
    within_slo: int
    window_s: float

    @property
    def share(self) -> float | None:
        """Share of requests within their SLO, 0 to 1; None when there were none."""
        return self.within_slo / self.requests if self.requests else None

    @property
    def goodput_rps(self) -> float:
        return self.within_slo / self.window_s
