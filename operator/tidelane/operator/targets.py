"""What services and policies ask for, and the one rule by which it becomes what is in force. Pure.

Each field on its own goes to the first of the layers, from the strongest to the weakest, that says it; the last layer
is what is built in. Two pairs of fields bound each other: tpot and maxTokenGap, minDecodeShare and maxDecodeShare.
Where winners from different layers contradict each other, the one of the weaker layer takes the value of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from tidelane.engine.slo import Slo
from tidelane.operator.quantities import format_duration, parse_duration_s
from tidelane.rpc.wire import ShareBounds


@dataclass(frozen=True, slots=True)
class Targets:
    """What one place says of latency and lanes; None: nothing. Shares are of the device, in percent."""

    ttft_s: float | None = None
    ttft_per_1k_input_tokens_s: float | None = None
    tpot_s: float | None = None
    percentile: int | None = None
    max_token_gap_s: float | None = None
    min_decode_share: int | None = None
    max_decode_share: int | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Of a mapping with `slo` and `execution`, as services and policies have them. Raises ValueError."""
        slo, execution = raw.get("slo", {}), raw.get("execution", {})
        said: dict[str, Any] = {field: parse_duration_s(slo[name]) for field, name in _DURATIONS.items() if name in slo}
        return cls(
            percentile=slo.get("percentile"),
            min_decode_share=execution.get("minDecodeShare"),
            max_decode_share=execution.get("maxDecodeShare"),
            **said,
        )

    def shown(self) -> dict[str, str | int]:
        """By the names of the resources, in their form; fields that say nothing are left out."""
        return {name: self._written(field) for field, name in NAMES.items() if getattr(self, field) is not None}

    def _written(self, field: str) -> str | int:
        value: float | int = getattr(self, field)
        return format_duration(value) if field in _DURATIONS else int(value)


_DURATIONS: Final[Mapping[str, str]] = {
    "ttft_s": "ttft",
    "ttft_per_1k_input_tokens_s": "ttftPer1kInputTokens",
    "tpot_s": "tpot",
    "max_token_gap_s": "maxTokenGap",
}
NAMES: Final[Mapping[str, str]] = {
    **_DURATIONS,
    "percentile": "percentile",
    "min_decode_share": "minDecodeShare",
    "max_decode_share": "maxDecodeShare",
}
SPEC: Final = "spec"
BUILT_IN: Final = "built in"
DEFAULTS: Final = Targets(ttft_s=1.0, ttft_per_1k_input_tokens_s=0.0, tpot_s=0.1, percentile=99)
# The first of each pair must not be above the second.
_ORDERED: Final = (("tpot_s", "max_token_gap_s"), ("min_decode_share", "max_decode_share"))


@dataclass(frozen=True, slots=True)
class Layer:
    """Targets and where they come from, in the words of `status.effectiveSLO.sources`."""

    source: str
    targets: Targets


@dataclass(frozen=True, slots=True)
class Effective:
    """What is in force. `sources` names where each field that is set comes from."""

    targets: Targets
    sources: Mapping[str, str]

    @property
    def slo(self) -> Slo:
        of = self.targets
        assert of.ttft_s is not None
        assert of.tpot_s is not None
        assert of.percentile is not None
        return Slo(of.ttft_s, of.tpot_s, of.ttft_per_1k_input_tokens_s or 0.0, of.percentile, of.max_token_gap_s)

    @property
    def bounds(self) -> ShareBounds | None:
        low, high = self.targets.min_decode_share, self.targets.max_decode_share
        if low is None and high is None:
            return None
        return ShareBounds((low or 0) / 100, (100 if high is None else high) / 100)


def merge(layers: Sequence[Layer]) -> Effective:
    """Of layers from the strongest to the weakest; what is built in is below them all."""
    ranked = (*layers, Layer(BUILT_IN, DEFAULTS))
    ranks: dict[str, int] = {}
    for field in NAMES:
        rank = next((at for at, each in enumerate(ranked) if getattr(each.targets, field) is not None), None)
        if rank is not None:
            ranks[field] = rank
    targets = Targets(**{field: getattr(ranked[rank].targets, field) for field, rank in ranks.items()})
    for low, high in _ORDERED:
        if low in ranks and high in ranks and getattr(targets, low) > getattr(targets, high):
            stronger, weaker = (low, high) if ranks[low] <= ranks[high] else (high, low)
            targets = replace(targets, **{weaker: getattr(targets, stronger)})
            ranks[weaker] = ranks[stronger]
    return Effective(targets, {NAMES[field]: ranked[rank].source for field, rank in ranks.items()})


def differences(before: Targets, after: Targets) -> Mapping[str, tuple[str, str]]:
    """By name, the values of fields that differ, as the resources write them; none where nothing is said."""
    old, new = before.shown(), after.shown()
    names = [NAMES[each.name] for each in fields(Targets)]
    return {
        name: (str(old.get(name, "none")), str(new.get(name, "none")))
        for name in names
        if old.get(name) != new.get(name)
    }
