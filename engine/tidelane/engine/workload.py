"""What traffic was like, in few numbers: how often requests come, in what bursts, and how long they are.

Everything in a sketch is a sum, so the sketches of replicas and of stretches of time add up. Standard library only: the
wire and the operator import this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Self

# Up to 8 tokens one bucket each, then four an octave, which are 19 % wide.
_EXACT: Final = 8
_PER_OCTAVE: Final = 4
_OCTAVES: Final = 18
STARTS: Final = (*range(_EXACT), *(round(_EXACT * 2 ** (at / _PER_OCTAVE)) for at in range(_PER_OCTAVE * _OCTAVES + 1)))
# Longer ones count as this long.
MOST_TOKENS: Final = STARTS[-1] - 1


def bucket_of(tokens: int) -> int:
    """The bucket i whose STARTS[i] <= tokens < STARTS[i + 1]."""
    return bisect_right(STARTS, min(max(tokens, 0), MOST_TOKENS)) - 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many requests had so many tokens: `counts[i]` of them between STARTS[i] and STARTS[i + 1], with no zeros at
    the end. `tokens` is their sum, which keeps the mean exact."""

    counts: tuple[int, ...] = ()
    tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.counts) >= len(STARTS):
            raise ValueError(f"{len(self.counts)} counts of lengths, of {len(STARTS) - 1} at most")
        if self.tokens < 0 or any(count < 0 for count in self.counts):
            raise ValueError("counts of lengths must not be negative")

    @classmethod
    def of(cls, by_bucket: Mapping[int, int], tokens: int) -> Self:
        longest = max((at for at, count in by_bucket.items() if count), default=-1)
        return cls(tuple(by_bucket.get(at, 0) for at in range(longest + 1)), tokens)

    @property
    def requests(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """In tokens; 0 of no requests."""
        return self.tokens / self.requests if self.requests else 0.0

    def __add__(self, other: Lengths) -> Lengths:
        counts = tuple(a + b for a, b in zip_longest(self.counts, other.counts, fillvalue=0))
        return Lengths(counts, self.tokens + other.tokens)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(the least tokens, the most, how many requests), ascending, without empty ones."""
        for at, count in enumerate(self.counts):
            if count:
                yield STARTS[at], STARTS[at + 1] - 1, count


@dataclass(frozen=True, slots=True)
class Sketch:
    """Traffic as one replica saw it over `observed_s` seconds, or several over the sum of theirs.

    `requests` arrived, `flex_requests` of them of the tier flex. Between them were `gaps`, of `gaps_s` seconds together
    and `gaps_squared_s2` the sum of their squares. `reused` is the part of prompts that the KV cache held; it and
    `outputs` are of requests that got as far.
    """

    observed_s: float = 0.0
    requests: int = 0
    flex_requests: int = 0
    gaps: int = 0
    gaps_s: float = 0.0
    gaps_squared_s2: float = 0.0
    prompts: Lengths = Lengths()
    outputs: Lengths = Lengths()
    reused: Lengths = Lengths()

    def __post_init__(self) -> None:
        if min(self.observed_s, self.requests, self.flex_requests, self.gaps, self.gaps_s, self.gaps_squared_s2) < 0:
            raise ValueError("times and counts of a sketch must not be negative")
        if self.flex_requests > self.requests:
            raise ValueError("flex_requests must not be above requests")

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(
            self.observed_s + other.observed_s,
            self.requests + other.requests,
            self.flex_requests + other.flex_requests,
            self.gaps + other.gaps,
            self.gaps_s + other.gaps_s,
            self.gaps_squared_s2 + other.gaps_squared_s2,
            self.prompts + other.prompts,
            self.outputs + other.outputs,
            self.reused + other.reused,
        )

    @property
    def rate_rps(self) -> float:
        """Requests a second at one replica."""
        return self.requests / self.observed_s if self.observed_s > 0 else 0.0

    @property
    def burstiness(self) -> float:
        """Squared coefficient of variation of the gaps: 0 of a metronome, 1 of a Poisson process, above 1 in bursts.

        1 where there are too few gaps to tell.
        """
        if self.gaps < 2 or self.gaps_s <= 0:
            return 1.0
        mean_s = self.gaps_s / self.gaps
        return max(0.0, self.gaps_squared_s2 / self.gaps / mean_s**2 - 1)

    @property
    def flex_share(self) -> float:
        return self.flex_requests / self.requests if self.requests else 0.0


class Tally:
    """A sketch in the making, at a few additions a request."""

    def __init__(self) -> None:
        self.requests = 0
        self._flex_requests = 0
        self._gaps = 0
        self._gaps_s = 0.0
        self._gaps_squared_s2 = 0.0
        self._buckets: dict[str, Counter[int]] = {name: Counter() for name in ("prompts", "outputs", "reused")}
        self._tokens: Counter[str] = Counter()

    def arrived(self, gap_s: float | None, prompt_tokens: int, *, flex: bool) -> None:
        """`gap_s` after the request before; None: of which nothing is known."""
        self.requests += 1
        self._flex_requests += flex
        if gap_s is not None:
            self._gaps += 1
            self._gaps_s += gap_s
            self._gaps_squared_s2 += gap_s * gap_s
        self._count("prompts", prompt_tokens)

    def began(self, reused_tokens: int) -> None:
        self._count("reused", reused_tokens)

    def ended(self, output_tokens: int) -> None:
        self._count("outputs", output_tokens)

    def sketch(self, observed_s: float) -> Sketch:
        lengths = {name: Lengths.of(counts, self._tokens[name]) for name, counts in self._buckets.items()}
        return Sketch(
            observed_s,
            self.requests,
            self._flex_requests,
            self._gaps,
            self._gaps_s,
            self._gaps_squared_s2,
            **lengths,
        )

    def _count(self, name: str, tokens: int) -> None:
        tokens = min(tokens, MOST_TOKENS)
        self._buckets[name][bucket_of(tokens)] += 1
        self._tokens[name] += tokens
