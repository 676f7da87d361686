"""From the loop's state to what a router asks about: pure, and worked out with each heartbeat."""

from __future__ import annotations

from collections import Counter
from typing import Final

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import decode_work, prefill_work
from tidelane.engine.load import Outlook
from tidelane.engine.request import ServiceTier
from tidelane.engine.scheduling.plan import State, Waiting

# The rate is that of a pass of so many tokens: a short one says more of what a pass costs by itself.
RATED_TOKENS: Final = 512
_TIERS: Final = {tier.rank: tier.value for tier in ServiceTier}


def outlook(state: State, units: int, split: tuple[int, int]) -> Outlook:
    """`units` are the device's; `split` those of decode and prefill as last split, (0, 0) if it never was."""
    queued_tokens = {tier.value: 0 for tier in ServiceTier}
    requests = Counter({tier.value: 0 for tier in ServiceTier})
    waiting: tuple[Waiting, ...] = (*state.queued, *state.prefilling)
    tiers = [job.priority[0] for job in waiting] + [each.priority[0] for each in state.decoding]
    for job in waiting:
        queued_tokens[_TIERS[job.priority[0]]] += job.tokens - job.computed
    for tier in tiers:
        requests[_TIERS[tier]] += 1
    decode_units, prefill_units = split if all(split) and waiting and state.decoding else (units, units)
    pass_s = state.estimates.seconds(Phase.PREFILL, prefill_units, prefill_work([(0, RATED_TOKENS)]))
    # Who waits now will decode beside whoever comes next.
    batch = len(tiers) + 1
    context = sum(each.context for each in state.decoding) + sum(job.tokens for job in waiting)
    step_s, wider_s = (
        state.estimates.seconds(Phase.DECODE, decode_units, decode_work(size, context)) for size in (batch, batch + 1)
    )
    return Outlook(
        queued_tokens, dict(requests), RATED_TOKENS / pass_s if pass_s > 0 else 0.0, step_s, max(0.0, wider_s - step_s)
    )
