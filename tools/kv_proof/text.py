"""Greedy text whose KV was pushed out to host memory and disk between turns, against text whose KV never left.

Three runs of each case, of the same requests:

1. with tiers: a pool, host memory and a disk that are each too small for all, under the canary.
2. resident: a pool for all and nothing below it, which repeats the launches of the first run one by one. All that
   differs is where KV was meanwhile, so every token must be the same.
3. resident, with batches of its own: what other batches alone do to the text, for comparison. It proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tools.kv_proof.replay import Diverged
from tools.kv_proof.text_runs import Answer, Bench, Case, Run, Tell, resident, with_tiers

from tidelane.engine.kv.canary import WrongKV

# Of the blocks that were found, by each way, at least: else little would have been proven.
_SHARE_BELOW = 0.05


@dataclass(frozen=True, slots=True)
class Compared:
    """`from_host` and `from_disk` are blocks that were found there, `on_device` those that had not left. `own_batches`:
    answers that differ where the resident engine composes its batches itself."""

    case: str
    turns: int
    tokens: int
    differing: tuple[str, ...]
    launches: int
    fused: int
    on_device: int
    from_host: int
    from_disk: int
    left_device: int
    left_host: int
    own_batches: int
    seconds: float
    faults: tuple[str, ...]


def compare(bench: Bench, case: Case, tell: Tell) -> Compared:
    began_s = time.monotonic()
    try:
        tiered = with_tiers(bench, case, tell)
    except WrongKV as error:
        return _failed(case, began_s, f"the canary: {error}")
    repeated: Run | None = None
    faults: list[str] = []
    try:
        repeated = resident(bench, case, tiered, tell)
    except Diverged as error:
        faults.append(f"the resident engine could not repeat the launches: {error}")
    own = resident(bench, case, replace(tiered, steps=()), tell)
    return _compared(bench, case, tiered, repeated, own, faults, time.monotonic() - began_s)


def _compared(
    bench: Bench, case: Case, tiered: Run, repeated: Run | None, own: Run, faults: list[str], seconds: float
) -> Compared:
    answers = tiered.answers
    differing = [] if repeated is None else differences(answers, repeated.answers)
    faults += [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error is not None]
    faults += differing
    for name, run in (("with tiers", tiered), ("resident", repeated or tiered)):
        if run.leaked_blocks:
            faults.append(f"{name}: {run.leaked_blocks} device blocks were not given back")
    moved = tiered.moved
    found = sum(answer.cached_tokens for answer in answers.values()) // bench.loaded.facts.kv_layout.block_tokens
    from_host = moved.loaded - moved.fetched
    for place, blocks in (("in host memory", from_host), ("on the disk", moved.fetched)):
        if blocks < _SHARE_BELOW * found:
            faults.append(f"only {blocks} of {found} blocks were found {place}: too few to prove anything")
    return Compared(
        case=case.name,
        turns=len(answers),
        tokens=sum(len(answer.tokens) for answer in answers.values()) if repeated is not None else 0,
        differing=tuple(differing),
        launches=len(tiered.steps),
        fused=sum(step.plan.fused for step in tiered.steps),
        on_device=found - moved.loaded,
        from_host=from_host,
        from_disk=moved.fetched,
        left_device=moved.left_device,
        left_host=moved.left_host,
        own_batches=sum(answers[name].tokens != answer.tokens for name, answer in own.answers.items()),
        seconds=seconds,
        faults=tuple(faults),
    )


def differences(left: Mapping[str, Answer], right: Mapping[str, Answer]) -> list[str]:
    """In words, of each request whose answers, or what was found for them, are not the same."""
    said = []
    for name, answer in left.items():
        other = right[name]
        if answer.tokens != other.tokens:
            at = next(
                (at for at, (a, b) in enumerate(zip(answer.tokens, other.tokens, strict=False)) if a != b),
                min(len(answer.tokens), len(other.tokens)),
            )
            said.append(f"{name}: the texts differ from token {at} of {len(other.tokens)} on")
        elif answer.cached_tokens != other.cached_tokens:
            said.append(f"{name}: {answer.cached_tokens} tokens were found, and {other.cached_tokens} by the other")
    return said


def _failed(case: Case, began_s: float, fault: str) -> Compared:
    seconds = time.monotonic() - began_s
    return Compared(case.name, 0, 0, (), 0, 0, 0, 0, 0, 0, 0, 0, seconds, (fault,))
