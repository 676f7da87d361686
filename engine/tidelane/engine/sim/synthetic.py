"""From a sketch of traffic to traffic: another sample of what came.

Gaps are gamma distributed, with the measured rate and burstiness. Lengths follow their histograms at evenly spread
quantiles, in random order, so that a short trace has the tails of a long one. A prompt's reused part is drawn at the
quantile of the prompt: since no prompt reuses more than it has, that fits always, and long prompts are those of long
conversations. Answers are as long whatever the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, takewhile

from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.workload import Lengths, Sketch, Tally

# Of a block by which a reused beginning is told, and of KV. That of engines, or it divides theirs.
BLOCK_TOKENS = 16
# Beyond these a stream is a metronome, or a single burst.
_LEAST_BURSTINESS, _MOST_BURSTINESS = 0.01, 50.0


class TooLittleSeen(ValueError):
    """Too few requests came, or ended, to say what traffic is like."""


def synthetic(sketch: Sketch, requests: int, seed: int) -> Traffic:
    """What one replica gets: `requests` arrivals at the rate of the sketch. Raises TooLittleSeen."""
    if not (sketch.rate_rps > 0 and sketch.prompts.requests and sketch.outputs.requests):
        raise TooLittleSeen("no request has come and ended")
    draw = random.Random(f"sketch:{seed}")
    order = list(range(requests))
    draw.shuffle(order)
    prompts, reused = (_spread(each, requests) for each in (sketch.prompts, sketch.reused))
    outputs = _spread(sketch.outputs, requests)
    draw.shuffle(outputs)
    flex = {at for at in range(requests) if _marked(at, sketch.flex_share)}
    arrivals = [
        Arrival(
            at_s,
            max(1, prompts[place]),
            max(1, outputs[number]),
            hash_ids=tuple(range(min(round(reused[place] / BLOCK_TOKENS), (prompts[place] - 1) // BLOCK_TOKENS))),
            tier="flex" if number in flex else "",
        )
        for number, (at_s, place) in enumerate(zip(_times_s(sketch, requests, draw), order, strict=True))
    ]
    return replace(Traffic(tuple(arrivals), requests / sketch.rate_rps), hashed_tokens=BLOCK_TOKENS)


def _times_s(sketch: Sketch, requests: int, draw: random.Random) -> list[float]:
    """Stretched to the measured rate, or chance alone would make a short trace busier than what was seen."""
    burstiness = min(max(sketch.burstiness, _LEAST_BURSTINESS), _MOST_BURSTINESS)
    gaps = [draw.gammavariate(1 / burstiness, burstiness) for _ in range(requests)]
    stretch = requests / sketch.rate_rps / (sum(gaps) or 1.0)
    return [stretch * at for at in accumulate(gaps[:-1], initial=0.0)]


def _spread(lengths: Lengths, number: int) -> list[int]:
    """`number` lengths, ascending, at evenly spread quantiles; zeros of no lengths."""
    if not lengths.requests:
        return [0] * number
    ranges = list(lengths.ranges())
    tilt = _tilt(lengths)
    found, below = iter(_bounds(ranges)), 0
    low, high, upto = next(found)
    values = []
    for at in range(number):
        wanted = (at + 0.5) / number * lengths.requests
        while wanted > upto:
            below = upto
            low, high, upto = next(found)
        part = (wanted - below) / (upto - below)
        # Straight over as much of the range as has its middle at the tilt.
        part = 2 * tilt * part if tilt <= 0.5 else 2 * tilt - 1 + (2 - 2 * tilt) * part
        values.append(round(low + (high - low) * part))
    return values


def _bounds(ranges: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(least, most, how many are in this range and those before it)."""
    upto = 0
    for low, high, count in ranges:
        upto += count
        yield low, high, upto


def _tilt(lengths: Lengths) -> float:
    """How far into their ranges lengths lie, 0 to 1, so that the mean is the measured one."""
    least = sum(low * count for low, _, count in lengths.ranges())
    most = sum(high * count for _, high, count in lengths.ranges())
    return min(1.0, max(0.0, (lengths.tokens - least) / (most - least))) if most > least else 0.5


def _marked(at: int, share: float) -> bool:
    """Of a row, a `share` that is spread evenly."""
    return int((at + 1) * share + 1e-9) > int(at * share + 1e-9)


def sketch_of(traffic: Traffic) -> Sketch:
    """As one replica with an endless KV cache would see it."""
    tally, known = Tally(), set[int]()
    before_s: float | None = None
    for each in traffic.arrivals:
        tally.arrived(None if before_s is None else each.at_s - before_s, each.input_tokens, flex=each.tier == "flex")
        blocks = sum(1 for _ in takewhile(known.__contains__, each.hash_ids))
        tally.began(min(blocks * traffic.hashed_tokens, each.input_tokens - 1))
        tally.ended(each.output_tokens)
        known.update(each.hash_ids)
        before_s = each.at_s
    return tally.sketch(traffic.duration_s)
