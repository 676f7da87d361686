"""Which backend gets a request: a pure function of the request and of what is known of each backend.

Predicted TTFT = (prompt tokens that come before it + its own that are not cached) / measured prefill rate, times the
backend's pace (how TTFT has come out against that lately). A backend is *easy* if the prediction takes no more than
SAFE of the targets and its KV cache has room. In this order:

1. A healthy backend before one that is not.
2. An easy one before one that is strained.
3. Among the easy: who has more of the prompt's beginning, in quarters of the prompt (whatever it saves, others can
   use); then who answers sooner; then who has fewer requests. `flex` has no hurry, so that all with room are easy, and
   goes where the fewest interactive requests are, which it could only disturb.
4. Among the strained: who is least late, in multiples of the targets.
5. Between equals the rendezvous hash of the prompt's beginning (Thaler and Ravishankar 1996), so that routers which
   know nothing of each other choose alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from tidelane.engine.request import ServiceTier
from tidelane.engine.slo import Slo
from tidelane.router.ask import Ask

# Of a target: predictions are of a moment ago, and others come between.
SAFE: Final = 0.7
_QUARTERS: Final = 4
ANY_TIME: Final = Slo(math.inf, math.inf)
# A backend that tells no rate yet is taken to be fast: one request will show.
_UNKNOWN_RATE: Final = 1e6


class Fitness(IntEnum):
    """Whether a backend can take requests, the best first."""

    HEALTHY = 0
    DOUBTFUL = 1  # ejected, or not heard of lately: better than nothing
    CLOSED = 2  # says that it takes none


class Why(StrEnum):
    """What decided, for metrics and logs."""

    ONLY = "only_one"
    RESIDENT = "prefix"
    SOONEST = "soonest"
    LEAST_DISTURBED = "least_disturbed"
    LEAST_LATE = "least_late"
    LAST_RESORT = "last_resort"


@dataclass(frozen=True, slots=True)
class View:
    """A backend as it looks to one request.

    `tokens_before` are prompt tokens that will be computed before this request's: queued there in its class or a higher
    one, and on their way there. `interactive` counts requests there that are not `flex`, and `requests` all. `step_s`
    is a decode step with this request in it. `kv_free_tokens` None: not known.
    """

    name: str
    fitness: Fitness
    tokens_before: float = 0.0
    resident_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    pace: float = 1.0
    step_s: float = 0.0
    requests: int = 0
    interactive: int = 0
    kv_free_tokens: int | None = None
    slo: Slo = ANY_TIME


@dataclass(frozen=True, slots=True)
class Ranked:
    """`strain` is the larger of TTFT and TPOT over their targets, as predicted: above 1 is late."""

    name: str
    ttft_s: float
    strain: float
    resident_tokens: int
    fitness: Fitness
    why: Why

    @property
    def on_time(self) -> bool:
        return self.strain <= 1.0


def choose(ask: Ask, views: Iterable[View]) -> tuple[Ranked, ...]:
    """All of `views`, the best first; `why` says what put each before those after it."""
    judged = sorted((_judge(ask, view) for view in views), key=lambda each: each.key)
    return tuple(
        Ranked(
            each.view.name,
            each.ttft_s,
            each.strain,
            each.view.resident_tokens,
            each.view.fitness,
            _why(ask, each, len(judged)),
        )
        for each in judged
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    view: View
    ttft_s: float
    strain: float
    easy: bool
    quarters: int
    key: tuple[object, ...]


def _judge(ask: Ask, view: View) -> _Judged:
    own = max(0, ask.prompt_tokens - view.resident_tokens)
    ttft_s = (view.tokens_before + own) / (view.prefill_tokens_per_s or _UNKNOWN_RATE) * view.pace
    strain = _strain(ask, view, ttft_s)
    has_room = view.kv_free_tokens is None or view.kv_free_tokens >= own
    flexible = ask.tier is ServiceTier.FLEX
    easy = has_room and (flexible or strain <= SAFE)
    quarters = min(_QUARTERS, _QUARTERS * view.resident_tokens // max(1, ask.prompt_tokens))
    order: tuple[float, ...]
    if not easy:
        order = (not has_room, strain)
    elif flexible:
        order = (view.interactive, -quarters)
    else:
        order = (-quarters,)
    order += (ttft_s, view.requests, view.step_s)
    home = hashlib.blake2b(ask.home + view.name.encode(), digest_size=8).digest()
    return _Judged(view, ttft_s, strain, easy, quarters, (view.fitness, not easy, *order, home, view.name))


def _strain(ask: Ask, view: View, ttft_s: float) -> float:
    slo = view.slo.for_request(ask.ttft_s, ask.tpot_s)
    return max(ttft_s / slo.ttft_target_s(ask.prompt_tokens), view.step_s / slo.tpot_s)


def _why(ask: Ask, judged: _Judged, of: int) -> Why:
    if of == 1:
        return Why.ONLY
    if judged.view.fitness is not Fitness.HEALTHY:
        return Why.LAST_RESORT
    if not judged.easy:
        return Why.LEAST_LATE
    if ask.tier is ServiceTier.FLEX:
        return Why.LEAST_DISTURBED
    return Why.RESIDENT if judged.quarters else Why.SOONEST
