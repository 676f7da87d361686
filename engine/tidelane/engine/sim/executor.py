"""The executor in virtual time: what is launched takes as long as the estimates say, and tokens are made up.

Lanes slow each other down while both are at work. It is worked out as a fluid: when one lane ends, what is left in the
other runs at full speed from then on. So a launch's end is known only until the next launch or end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import NO_WORK, PassWork, decode_work, prefill_work
from tidelane.engine.execution.executor import Completion, Sampled
from tidelane.engine.request import NewToken
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice
from tidelane.engine.sequence import Sequence
from tidelane.engine.sim.noise import Noise
from tidelane.engine.sim.shares import LaneShares
from tidelane.engine.sim.tiers import VirtualMover

_TOKEN = NewToken(0)


class LanesOverlap(RuntimeError):
    """A plan gave units away that are still at work: the scheduler's fault."""


@dataclass(frozen=True, slots=True)
class Handover:
    """KV that must reach the decode device, over a link, before its sequence can take a step.

    Each layer's KV leaves as soon as it is computed, so what is left at the end of prefill is that of the last layer.
    """

    bytes_per_s: float
    latency_s: float
    layer_token_bytes: float

    def seconds(self, tokens: int) -> float:
        return self.latency_s + tokens * self.layer_token_bytes / self.bytes_per_s


@dataclass(slots=True)
class _Launch:
    """One launch under way. `left_s` seconds of it, alone on the device, were left at `since_s`."""

    decode: DecodeBatch | None
    prefill: PrefillSlice | None
    units: int
    started_s: float
    left_s: float
    since_s: float
    end_s: float
    slowdown: float = 1.0

    def pace(self, slowdown: float, now_s: float) -> None:
        """From `now_s` on it runs `slowdown` times slower than alone."""
        self.left_s = max(0.0, self.left_s - (now_s - self.since_s) / self.slowdown)
        self.since_s = now_s
        self.slowdown = slowdown
        self.end_s = now_s + self.left_s * slowdown


class VirtualExecutor:
    """`times` are the truth here. Each launch costs `overhead_s` of the host's time besides, and waits for what `mover`
    brings."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        units: int,
        layers: int,
        sequences: Mapping[str, Sequence],
        times: Estimates,
        shares: LaneShares,
        noise: Noise,
        overhead_s: float = 0.0,
        handover: Handover | None = None,
        mover: VirtualMover | None = None,
    ) -> None:
        self.launches = 0
        self._clock = clock
        self._units = units
        self._layers = layers
        self._sequences = sequences
        self._times = times
        self._shares = shares
        self._noise = noise
        self._overhead_s = overhead_s
        self._handover = handover
        self._mover = mover
        self._decode: _Launch | None = None  # or a fused pass
        self._prefill: _Launch | None = None
        self._noted_s = clock()
        self._kv_arrives_s: dict[str, float] = {}
        self._tokens: dict[str, Sampled] = {}

    @property
    def next_end_s(self) -> float | None:
        """When the next completion is due if nothing is launched before."""
        first = self._first_to_end()
        return first.end_s if first is not None else None

    def launch(self, plan: Plan) -> None:
        now_s = self._clock()
        self._note(now_s)
        units = plan.partition
        if plan.fused:
            self._decode = self._start(plan.decode, plan.prefill, units.decode_units, now_s)
        else:
            if plan.decode is not None:
                self._decode = self._start(plan.decode, None, units.decode_units, now_s)
            if plan.prefill is not None:
                self._prefill = self._start(None, plan.prefill, units.prefill_units, now_s)
        self._pace(now_s)

    def poll(self) -> list[Completion]:
        now_s = self._clock()
        ended: list[Completion] = []
        while (first := self._first_to_end()) is not None and first.end_s <= now_s:
            self._note(first.end_s)
            if first is self._decode:
                self._decode = None
            else:
                self._prefill = None
            self._pace(first.end_s)
            sampled = self._sampled(first)
            ended.append(Completion(first.decode, first.prefill, first.units, first.started_s, first.end_s, sampled))
        return ended

    def run_on(self, most: int, until_s: float) -> list[Completion]:
        """End the decode step under way and launch the same again, up to `most` times and as long as they end before
        `until_s`; what ended, without samples. The last one launched is under way."""
        ended: list[Completion] = []
        step = self._decode
        if step is None or step.decode is None or most < 1:
            return ended
        assert self._prefill is None
        batch, units = len(step.decode.ids), step.units
        context = sum([self._sequences[i].computed for i in step.decode.ids])
        while len(ended) < most and step.end_s < until_s:
            begun_s = step.end_s
            self._note(begun_s)
            ended.append(Completion(step.decode, None, units, step.started_s, begun_s))
            self.launches += 1
            work = decode_work(batch, context + batch * len(ended))
            seconds = self._times.seconds(Phase.DECODE, units, work) * self._noise.factor() + self._overhead_s
            step = self._decode = _Launch(step.decode, None, units, begun_s, seconds, begun_s, begun_s + seconds)
        return ended

    def forget(self, job: int) -> None:
        """Activations are not kept here."""

    def close(self) -> None:
        self._decode = self._prefill = None

    def _first_to_end(self) -> _Launch | None:
        decode, prefill = self._decode, self._prefill
        if decode is None or prefill is None:
            return decode or prefill
        return decode if decode.end_s <= prefill.end_s else prefill

    def _start(self, decode: DecodeBatch | None, prefill: PrefillSlice | None, units: int, now_s: float) -> _Launch:
        used = sum(launch.units for launch in (self._decode, self._prefill) if launch is not None)
        if used + units > self._units or (decode and self._decode) or (prefill and self._prefill):
            raise LanesOverlap(f"{units} units given away while {used} of {self._units} are at work")
        self.launches += 1
        phase, work = self._work(decode, prefill)
        seconds = self._times.seconds(phase, units, work)
        if prefill is not None:
            seconds *= (prefill.last_layer - prefill.first_layer) / self._layers
        seconds = seconds * self._noise.factor() + self._overhead_s
        if prefill is not None and self._mover is not None:
            seconds = max(seconds, self._loaded_s(prefill, self._mover, seconds) - now_s)
        if decode is not None and self._kv_arrives_s:
            seconds += self._wait_for_kv(decode, now_s)
        return _Launch(decode, prefill, units, now_s, seconds, now_s, now_s + seconds)

    def _loaded_s(self, prefill: PrefillSlice, mover: VirtualMover, seconds: float) -> float:
        """When a pass can end that computes each layer once its KV is there. (Once the last one is, that is left.)"""
        arrivals = {each for span in prefill.spans for each in self._sequences[span.id].holding.arrivals}
        if not arrivals:
            return 0.0
        last_layer_s = seconds / (prefill.last_layer - prefill.first_layer)
        return mover.there_s(arrivals, prefill.last_layer / self._layers) + last_layer_s

    def _work(self, decode: DecodeBatch | None, prefill: PrefillSlice | None) -> tuple[Phase, PassWork]:
        work = NO_WORK
        if prefill is not None:
            work = prefill_work((span.start, span.stop) for span in prefill.spans)
            if decode is None:
                return Phase.PREFILL, work
        assert decode is not None
        sequences = self._sequences
        step = decode_work(len(decode.ids), sum([sequences[i].computed for i in decode.ids]))
        return (Phase.DECODE, step) if prefill is None else (Phase.FUSED, step + work)

    def _pace(self, now_s: float) -> None:
        decode, prefill = self._decode, self._prefill
        both = decode is not None and prefill is not None
        contention = self._times.contention
        if decode is not None:
            decode.pace(contention.decode_slowdown if both else 1.0, now_s)
        if prefill is not None:
            prefill.pace(contention.prefill_slowdown if both else 1.0, now_s)

    def _note(self, now_s: float) -> None:
        if now_s > self._noted_s:
            decode, prefill = self._decode, self._prefill
            fused = decode is not None and decode.prefill is not None
            self._shares.add(
                self._noted_s,
                now_s,
                decode.units if decode is not None and not fused else 0,
                prefill.units if prefill is not None else 0,
                decode.units if decode is not None and fused else 0,
            )
            self._noted_s = now_s

    def _sampled(self, launch: _Launch) -> tuple[Sampled, ...]:
        sampled = [self._token_of(i) for i in launch.decode.ids] if launch.decode is not None else []
        if launch.prefill is not None and launch.prefill.last_layer == self._layers:
            for span in launch.prefill.spans:
                whole = span.stop == len(self._sequences[span.id].tokens)
                sampled.append(Sampled(span.id, _TOKEN if whole else None))
                if whole and self._handover is not None:
                    self._kv_arrives_s[span.id] = launch.end_s + self._handover.seconds(span.tokens)
        return tuple(sampled)

    def _token_of(self, sequence_id: str) -> Sampled:
        """Always the same, so made once: there are millions of tokens in a replay."""
        sampled = self._tokens.get(sequence_id)
        if sampled is None:
            sampled = self._tokens[sequence_id] = Sampled(sequence_id, _TOKEN)
        return sampled

    def _wait_for_kv(self, decode: DecodeBatch, now_s: float) -> float:
        """How long the step must wait for the KV of those who join it."""
        arrive_s = self._kv_arrives_s
        return max(0.0, *(arrive_s.pop(i, 0.0) - now_s for i in decode.ids))
