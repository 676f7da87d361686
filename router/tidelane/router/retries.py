"""Whether another backend is asked, and which; and what the client hears when none is. Pure.

Only before a byte of the answer has gone to the client, each backend once:
- no connection, or 503 (it loads, drains or has stopped): nothing was computed that anybody saw; ask the next.
- broken off before the first byte: the same, but once only. A request during which two backends broke off may be what
  breaks them.
- 429: another is asked if it should be on time, or should answer before the first may be asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tidelane.engine.http.errors import ApiError, Unavailable
from tidelane.router.choice import Fitness, Ranked

MOST_BROKEN_OFF: Final = 2


class Ended(StrEnum):
    """How a try ended without an answer for the client."""

    UNREACHABLE = "unreachable"
    CLOSED = "closed"  # 503
    BUSY = "busy"  # 429
    BROKEN_OFF = "broken_off"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A whole answer that says no. `retry_after_s` None: it does not say when to come again."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Try:
    name: str
    ended: Ended
    refusal: Refusal | None = None


class BackendLost(ApiError):
    """The replica that worked on this request is gone."""

    status = 502
    type = "server_error"


def next_backend(ranked: Sequence[Ranked], tries: Sequence[Try], most_tries: int) -> Ranked | None:
    """`ranked` are all backends as they look now, the best first."""
    tried = {each.name for each in tries}
    best = next((each for each in ranked if each.name not in tried), None)
    broken_off = sum(each.ended is Ended.BROKEN_OFF for each in tries)
    if best is None or len(tries) >= most_tries or broken_off >= MOST_BROKEN_OFF:
        return None
    if any(each.ended is Ended.BUSY for each in tries):
        soonest_s = soonest_retry_s(tries)
        sooner = soonest_s is not None and best.ttft_s < soonest_s
        if best.fitness is not Fitness.HEALTHY or not (best.on_time or sooner):
            return None
    return best


def soonest_retry_s(tries: Sequence[Try]) -> float | None:
    told = [each.refusal.retry_after_s for each in tries if each.refusal is not None]
    return min((each for each in told if each is not None), default=None)


def last_word(tries: Sequence[Try]) -> Refusal | ApiError:
    """A 429 before a 503, since it says that there will be room; either with the soonest time told by any."""
    for ended in (Ended.BUSY, Ended.CLOSED):
        refusals = [each.refusal for each in tries if each.ended is ended and each.refusal is not None]
        if refusals:
            return min(refusals, key=lambda each: float("inf") if each.retry_after_s is None else each.retry_after_s)
    names = ", ".join(each.name for each in tries)
    if any(each.ended is Ended.BROKEN_OFF for each in tries):
        return BackendLost(
            f"Every replica that worked on this request broke off ({names}). Send it once more at most: it may be what "
            "they fail of.", code="backend_lost",
        )  # fmt: skip
    return Unavailable(
        f"No replica can be reached ({names or 'none is known'}). Try again shortly.",
        code="no_backend", retry_after_s=1,
    )  # fmt: skip
