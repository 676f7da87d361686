"""What to send and when: arrivals by a seeded Poisson process, of one or several kinds of request."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Of a hashed block, as in Mooncake's traces.
HASHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, due `at_s` after the start. Lengths are what to ask for; the server tells what they came to be.

    `hash_ids` name the blocks of the prompt, where a trace tells: two prompts begin alike as far as these are the same.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    kind: str = "request"
    hash_ids: tuple[int, ...] = ()
    tier: str = ""  # the service tier to ask for; none


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals by time, over `duration_s` seconds. Blocks that have hashes are of `hashed_tokens` each."""

    arrivals: tuple[Arrival, ...]
    duration_s: float
    hashed_tokens: int = HASHED_TOKENS

    def faster(self, speed: float) -> Traffic:
        """The same requests, `speed` times as dense."""
        arrivals = tuple(replace(each, at_s=each.at_s / speed) for each in self.arrivals)
        return replace(self, arrivals=arrivals, duration_s=self.duration_s / speed)

    @property
    def rate_rps(self) -> float:
        return len(self.arrivals) / self.duration_s

    def at_rate(self, rate_rps: float) -> Traffic:
        """The same requests, so dense that `rate_rps` arrive a second on average."""
        return self.faster(rate_rps / self.rate_rps)

    def limited(self, requests: int) -> Traffic:
        """The first `requests` of it."""
        if requests >= len(self.arrivals):
            return self
        arrivals = self.arrivals[:requests]
        return replace(self, arrivals=arrivals, duration_s=max(1.0, arrivals[-1].at_s))

    def first(self, duration_s: float) -> Traffic:
        """What arrives in the first `duration_s` seconds."""
        if duration_s >= self.duration_s:
            return self
        arrivals = tuple(each for each in self.arrivals if each.at_s < duration_s)
        return replace(self, arrivals=arrivals, duration_s=duration_s)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind: `rate_rps` a second on average, lengths drawn evenly from inclusive ranges of tokens."""

    name: str
    rate_rps: float
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    tier: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise ValueError(f"{self.name}: the rate must be above 0 and finite")
        for low, high in (self.input_tokens, self.output_tokens):
            if not 1 <= low <= high:
                raise ValueError(f"{self.name}: a length of {low}-{high} tokens; expected 1 <= low <= high")


_KIND = re.compile(r"(\w+):rate=([\d.]+),in=(\d+)(?:-(\d+))?,out=(\d+)(?:-(\d+))?(?:,tier=(\w+))?")


def parse_kind(text: str) -> Kind:
    """`NAME:rate=RPS,in=LOW-HIGH,out=LOW-HIGH`, where a single number stands for a range of one; `,tier=flex` may
    follow."""
    match = _KIND.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r}: expected NAME:rate=RPS,in=LOW-HIGH,out=LOW-HIGH, as in chat:rate=2,in=20-60,out=50"
        )
    name, rate, *bounds, tier = match.groups()
    in_low, in_high, out_low, out_high = (None if bound is None else int(bound) for bound in bounds)
    assert in_low is not None
    assert out_low is not None
    return Kind(name, float(rate), (in_low, in_high or in_low), (out_low, out_high or out_low), tier or "")


def poisson(kinds: Sequence[Kind], duration_s: float, seed: int) -> Traffic:
    """Each kind is an independent Poisson process with a generator of its own: adding one moves no other's arrivals."""
    arrivals: list[Arrival] = []
    for kind in kinds:
        draw = random.Random(f"{seed}:{kind.name}")
        at_s = draw.expovariate(kind.rate_rps)
        while at_s < duration_s:
            arrivals.append(
                Arrival(
                    at_s, draw.randint(*kind.input_tokens), draw.randint(*kind.output_tokens), kind.name, tier=kind.tier
                )
            )
            at_s += draw.expovariate(kind.rate_rps)
    return Traffic(tuple(sorted(arrivals, key=lambda each: each.at_s)), duration_s)
