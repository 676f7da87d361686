"""Whether a service would meet other targets, by what it last measured. Pure.

The status of a service holds, for the last window with requests, TTFT and TPOT at the percentile of its SLO, and the
share of requests within the targets in force. From these, without a model of the engine:

- Fewer than p % of requests have a TTFT within a target that the measured TTFT at p is above; at least p %, if not. So
  for TPOT. Of two such shares, the lesser bounds from above the share of requests within both, and their sum less 100 %
  from below (the Fréchet bounds).
- Targets that are all as loose or looser keep at least the measured share within them, tighter ones keep at most it.

All of it is of rounded figures, of the slowest replica, and by the least target that a prompt can have. It does not say
what the engine would do differently: it schedules by its targets, so a tighter TPOT costs TTFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from tidelane.operator.quantities import format_duration, parse_duration_s
from tidelane.operator.resources import Status
from tidelane.operator.targets import Targets


class Outlook(StrEnum):
    MEET = "WouldMeet"
    BREACH = "WouldBreach"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Prediction:
    """`at_least` and `at_most` bound the share of requests within the targets, in percent."""

    outlook: Outlook
    message: str
    at_least: int = 0
    at_most: int = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """What a service last measured, and the targets that it did so under."""

    ttft_s: float
    tpot_s: float
    attainment: int
    under: Targets

    @classmethod
    def of(cls, status: Status) -> Self | None:
        """None: nothing yet, or nothing that can be read."""
        slo = status.get("effectiveSLO", {})
        if not ("ttft" in status and "tpot" in status and "attainment" in status and "percentile" in slo):
            return None
        try:
            under = Targets.parse({"slo": slo})
            return cls(parse_duration_s(status["ttft"]), parse_duration_s(status["tpot"]), status["attainment"], under)
        except ValueError:
            return None


def predict(status: Status, wanted: Targets) -> Prediction:
    """`wanted` are whole targets, as `merge` makes them."""
    seen = Seen.of(status)
    if seen is None:
        return Prediction(Outlook.UNKNOWN, "no requests measured yet")
    assert wanted.ttft_s is not None
    assert wanted.tpot_s is not None
    assert wanted.percentile is not None
    assert seen.under.percentile is not None
    percent, needed = seen.under.percentile, wanted.percentile
    # Of prompts with an allowance by length, only the least part of their target is known.
    ttft_known = seen.ttft_s <= wanted.ttft_s or not wanted.ttft_per_1k_input_tokens_s
    ttft_within, tpot_within = seen.ttft_s <= wanted.ttft_s, seen.tpot_s <= wanted.tpot_s
    gap_known = wanted.max_token_gap_s is None
    at_least, at_most = 0, 100
    if (ttft_known and not ttft_within) or not tpot_within:
        at_most = percent - 1
    elif ttft_within and gap_known:
        at_least = max(0, 2 * percent - 100)
    if _no_tighter(wanted, seen.under):
        at_least = max(at_least, seen.attainment)
    if _no_tighter(seen.under, wanted):
        at_most = min(at_most, seen.attainment)
    at_least = min(at_least, at_most)
    told = (
        f"measured at p{percent}: TTFT {_against(seen.ttft_s, wanted.ttft_s)}, TPOT "
        f"{_against(seen.tpot_s, wanted.tpot_s)}; {seen.attainment} % within the targets in force"
    )
    if at_most < needed:
        return Prediction(Outlook.BREACH, told, at_least, at_most)
    each_within = ttft_within and tpot_within and gap_known and needed <= percent
    if at_least >= needed or each_within:
        return Prediction(Outlook.MEET, told, at_least, at_most)
    return Prediction(Outlook.UNKNOWN, f"{told}; too little to tell {needed} %", at_least, at_most)


def _against(measured_s: float, target_s: float) -> str:
    return f"{format_duration(measured_s)} ({format_duration(target_s)} wanted)"


def _no_tighter(these: Targets, than: Targets) -> bool:
    """Whether every request within the second is within the first."""
    gap, other_gap = these.max_token_gap_s, than.max_token_gap_s
    return (
        (these.ttft_s or 0) >= (than.ttft_s or 0)
        and (these.ttft_per_1k_input_tokens_s or 0) >= (than.ttft_per_1k_input_tokens_s or 0)
        and (these.tpot_s or 0) >= (than.tpot_s or 0)
        and (gap is None or (other_gap is not None and gap >= other_gap))
    )
