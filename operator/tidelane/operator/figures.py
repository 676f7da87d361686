"""The figures in a service's status: latency, attainment, goodput, lanes. Pure.

They change all the time; written at every change they would flood the API server. So they are rounded, move only when
they differ visibly from what is written, and are renewed at most every `Timing.figures_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from tidelane.operator.conditions import Verdict, written_verdict
from tidelane.operator.feasibility import feasible
from tidelane.operator.observation import KVPressure, Measured, Replica, Timing
from tidelane.operator.quantities import format_duration, parse_duration_s
from tidelane.operator.resources import ServiceSpec, Status

# A measured value replaces the one written when it differs by more than this part of it.
_VISIBLE: Final = 0.1
_PRESSURES: Final = {
    KVPressure.WAITING: "requests wait for room in its KV cache",
    KVPressure.PREEMPTING: "running requests lose their place to others, and are computed again",
    KVPressure.REFUSING: "its queue is full of requests that wait for room in its KV cache",
}
_FIGURES: Final = (
    *("ttft", "tpot", "ttftMedian", "tpotMedian", "ttftQueue", "ttftPrefill"),
    *("attainment", "goodput", "lanes"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What traffic shows: the fields of status that are rate-limited, and the conditions that go with them."""

    fields: Mapping[str, Any]
    slo_met: Verdict | None = None
    kv_pressure: Verdict | None = None
    slo_feasible: Verdict | None = None

    @classmethod
    def written(cls, status: Status) -> Self:
        verdicts = (written_verdict(status, name) for name in ("SLOMet", "KVPressure", "SLOFeasible"))
        return cls(_written(status), *verdicts)

    @classmethod
    def measured(cls, written: Status, serving: Sequence[Replica], spec: ServiceSpec) -> Self:
        """The last figures stay where a window brought none, so that an idle service writes nothing."""
        windows = [replica.measured for replica in serving if replica.measured and replica.measured.requests]
        fields, pressure = _written(written), _kv_pressure(serving)
        reach = feasible(serving, spec.slo, written_verdict(written, "SLOFeasible"))
        if serving:
            fields["goodput"] = _steady_rate(fields.get("goodput"), sum(each.goodput_rps for each in windows))
        if lanes := _lanes(written, serving):
            fields["lanes"] = lanes
        if not windows:
            return cls(fields, Verdict(None, "NoRequests" if serving else "NotServing"), pressure, reach)
        share = _attainment(windows)
        for name, latencies_s in (
            ("ttft", [each.ttft_s for each in windows]),
            ("tpot", [each.tpot_s for each in windows]),
            ("ttftMedian", [each.ttft_median_s for each in windows]),
            ("tpotMedian", [each.tpot_median_s for each in windows]),
        ):
            fields[name] = _steady_duration(fields.get(name), max(latencies_s))
        if parts := [each.parts for each in windows if each.parts]:
            # A wait of 2 ms in place of 1 ms is no news where TTFT is 500 ms.
            ttft_s = max(each.ttft_s for each in windows)
            for name, latency_s in (
                ("ttftQueue", max(each.queue_s for each in parts)),
                ("ttftPrefill", max(each.prefill_s for each in parts)),
            ):
                fields[name] = _steady_duration(fields.get(name), latency_s, visible_s=_VISIBLE * ttft_s)
        fields["attainment"] = _steady_percent(fields.get("attainment"), share)
        met = share * 100 >= spec.slo.percentile
        return cls(
            fields,
            Verdict(
                met, "Met" if met else "Missed", f"{fields['attainment']} % of requests, {spec.slo.percentile} % wanted"
            ),
            pressure,
            reach,
        )


def _written(status: Status) -> dict[str, Any]:
    return {name: value for name, value in status.items() if name in _FIGURES}


def _kv_pressure(serving: Sequence[Replica]) -> Verdict | None:
    """Of the replica that has most of it; None where none tells."""
    telling = [(each.kv_pressure, each.ref.index) for each in serving if each.kv_pressure is not None]
    if not telling:
        return None
    order = list(KVPressure)
    worst, index = max(telling, key=lambda each: (order.index(each[0]), -each[1]))
    if worst is KVPressure.NONE:
        return Verdict(False, worst.value)
    return Verdict(True, worst.value, f"replica {index}: {_PRESSURES[worst]}; more replicas or shorter requests help")


def _attainment(windows: Sequence[Measured]) -> float:
    requests = sum(each.requests for each in windows)
    return sum(each.attainment * each.requests for each in windows) / requests


def _lanes(written: Status, serving: Sequence[Replica]) -> Sequence[Mapping[str, Any]]:
    before = {each["replica"]: each for each in written.get("lanes", ())}
    shown = []
    for replica in serving:
        index, lanes = replica.ref.index, replica.lanes
        known = before.get(index)
        if lanes is None:
            # The device is not split at this moment: the last split says more than none.
            shown += [known] if known else []
            continue
        total = lanes.decode + lanes.prefill
        moved = known is None or known["decode"] + known["prefill"] != total
        if known and not moved and abs(known["decode"] - lanes.decode) <= _VISIBLE * total / 2:
            shown.append(known)
            continue
        shown.append(
            {
                "replica": index,
                "decode": lanes.decode,
                "prefill": lanes.prefill,
                "split": f"{lanes.decode}:{lanes.prefill}",
            }
        )
    return shown


def _steady_duration(written: str | None, measured_s: float, visible_s: float = 0.0) -> str:
    if written is not None:
        before_s = parse_duration_s(written)
        if abs(measured_s - before_s) <= max(_VISIBLE * before_s, visible_s):
            return written
    return format_duration(_two_digits(measured_s))


def _steady_rate(written: str | None, measured_rps: float) -> str:
    if written is not None and measured_rps > 0:
        before = float(written.removesuffix("/s"))
        if abs(measured_rps - before) <= _VISIBLE * before:
            return written
    return f"{_two_digits(measured_rps):g}/s"


def _steady_percent(written: int | None, share: float) -> int:
    # Rounded down: 100 means all of them.
    percent = math.floor(share * 100 + 1e-9)
    if written is not None and percent != 100 and abs(share * 100 - written) <= 1:
        return written
    return percent


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def due_in_s(status: Status, timing: Timing, now: datetime) -> float:
    measured_at = status.get("measuredAt")
    if measured_at is None:
        return 0.0
    age_s = (now - datetime.fromisoformat(measured_at)).total_seconds()
    # A clock that was set back must not silence the figures for longer than the interval.
    return timing.figures_s - age_s if 0 <= age_s < timing.figures_s else 0.0
