"""Whether targets are within reach at all, by what engines predict of one request alone on their device. Pure.

A prediction can be wrong, so it says no only where what was measured misses the target as well: targets that are met
are within reach, whatever is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tidelane.engine.slo import Slo
from tidelane.operator.conditions import Verdict
from tidelane.operator.observation import Replica
from tidelane.operator.quantities import format_duration

# Predictions move a little all the time; what was out of reach is within it again once there is this much to spare.
_TO_SPARE: Final = 0.05


def feasible(serving: Sequence[Replica], slo: Slo, before: Verdict | None) -> Verdict | None:
    """By the first replica for which a target is out of reach. None where no engine tells, nor ever told.

    `before` stays as it is while the same target is out of reach: the best moves a little all the time.
    """
    telling = [each for each in serving if each.reach and each.measured and each.measured.requests]
    if not telling:
        return Verdict(None, "NoRequests") if before else None
    was_out = before is not None and before.status is False
    found = [text for each in telling for text in _out_of_reach(each, slo, 1 - _TO_SPARE if was_out else 1.0)]
    if not found:
        return Verdict(True, "WithinReach")
    if before is not None and was_out and _wanted(before.message) == _wanted(found[0]):
        return before
    return Verdict(False, "OutOfReach", found[0])


def _wanted(message: str) -> str:
    return message.partition(";")[0]


def _out_of_reach(replica: Replica, slo: Slo, part: float) -> Iterator[str]:
    """Of each target that is; `part` of it is what must be kept."""
    reach, measured = replica.reach, replica.measured
    assert reach is not None
    assert measured is not None
    index, tpot_s, ttft_s = replica.ref.index, slo.tpot_s * part, slo.ttft_target_s(reach.input_tokens) * part
    if reach.tpot_s > tpot_s and measured.tpot_s > tpot_s:
        wanted = f"TPOT {format_duration(slo.tpot_s)}"
        yield f"{wanted} wanted; {_best(reach.tpot_s)} is the best that replica {index} can give, {_HOW}"
    if reach.ttft_s > ttft_s and measured.ttft_s > ttft_s:
        allowance_s = slo.ttft_per_1k_input_tokens_s
        allowance = f" and {format_duration(allowance_s)} for every 1,000 tokens" if allowance_s else ""
        wanted = f"TTFT {format_duration(slo.ttft_s)}{allowance}"
        prompt = f"a prompt of {reach.input_tokens} tokens"
        yield f"{wanted} wanted; {_best(reach.ttft_s)} is the best that replica {index} can give {prompt}, {_HOW}"


_HOW: Final = "alone on its device and by prediction: raise the target, or use a faster device or a smaller model"


def _best(seconds: float) -> str:
    return format_duration(float(f"{seconds:.2g}"))
