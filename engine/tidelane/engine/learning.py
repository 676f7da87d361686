"""Keeping predictions true: what launches take corrects them.

Those that had the device to themselves correct the times; decode steps beside prefill show what contention costs.
Prefill that may have waited for KV from a lower tier teaches neither: part of its time is the tier's.
"""

from __future__ import annotations

from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import PassWork, prefill_work
from tidelane.engine.execution.executor import Completion
from tidelane.engine.scheduling.plan import Flight, Plan, PrefillSlice


class Learner:
    """Hears of every launch and every end. `estimates` are what it knows by now."""

    def __init__(self, estimates: Estimates, layers: int) -> None:
        self.estimates = estimates
        self._layers = layers
        # Whether the other lane was at work at any time during what is, or was last, in flight.
        self._decode_disturbed = False
        self._prefill_disturbed = False
        self._begun_beside_prefill = False
        self._prefill_awaits_kv = False

    def launched(self, plan: Plan, flight: Flight, *, awaits_kv: bool) -> None:
        """`flight` as it is with the plan's launches in it. `awaits_kv`: the plan's prefill reads KV that may be on its
        way yet."""
        if plan.decode is not None:
            self._decode_disturbed = False
            self._begun_beside_prefill = flight.prefill is not None and not plan.fused
        if plan.prefill is not None:
            self._prefill_disturbed = False
            self._prefill_awaits_kv = awaits_kv
        if flight.decode is not None and flight.prefill is not None and not plan.fused:
            self._decode_disturbed = self._prefill_disturbed = True

    def ended(self, completion: Completion, decoded: PassWork, beside: PrefillSlice | None) -> None:
        """`decoded` is the decode step in it, if any; `beside` what prefilled as it ended."""
        if completion.failure is not None:
            return
        seconds, prefill = completion.ended_s - completion.started_s, completion.prefill
        if prefill is None:
            if not self._decode_disturbed:
                self._correct(Phase.DECODE, completion.units, decoded, 1.0, seconds)
            elif beside is not None and self._begun_beside_prefill and not self._prefill_awaits_kv:
                # It computed all the while, or nearly.
                self.estimates = self.estimates.learned_beside(completion.units, decoded, _work(beside), seconds)
        elif self._prefill_awaits_kv:
            return
        elif completion.decode is not None:
            self._correct(Phase.FUSED, completion.units, decoded + _work(prefill), 1.0, seconds)
        elif not self._prefill_disturbed:
            share = (prefill.last_layer - prefill.first_layer) / self._layers
            self._correct(Phase.PREFILL, completion.units, _work(prefill), share, seconds)

    def _correct(self, phase: Phase, units: int, work: PassWork, share: float, seconds: float) -> None:
        self.estimates = self.estimates.learned(phase, units, work, share, seconds)


def _work(prefill: PrefillSlice) -> PassWork:
    return prefill_work((span.start, span.stop) for span in prefill.spans)
