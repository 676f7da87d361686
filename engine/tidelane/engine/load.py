"""What a router is told of an engine: how much there is to do, and how fast it is done.

The loop tells the front an `Outlook`; the front tells whoever asks a `Load`. Both processes and the router read these:
msgspec and targets only.
"""

from __future__ import annotations

import msgspec

from tidelane.engine.slo import Slo


class Outlook(msgspec.Struct, frozen=True):
    """By service tier: prompt tokens that are still to be computed (what the KV cache has does not count), and requests
    that wait or run.

    `prefill_tokens_per_s` is what prefill does on the units that it has now, by what passes took; 0: not known.
    `step_s` is how long a decode step should take with one request more than there are, and `step_more_s` what each
    further one adds.
    """

    queued_tokens: dict[str, int] = {}
    requests: dict[str, int] = {}
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    step_more_s: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """`GET /load` of a front. `reason` says why it is not `ready`. The engine said all else `age_s` ago.

    KV in tokens: what the device holds at most, what of that can be had now, and how much is kept in all tiers for
    prompts that begin alike. All 0 until the engine has spoken. `started_s` is Unix time.
    """

    model: str
    started_s: int
    ready: bool
    draining: bool
    reason: str | None = None
    age_s: float = 0.0
    slo: Slo | None = None
    max_context_tokens: int = 0
    kv_tokens: int = 0
    kv_free_tokens: int = 0
    kv_kept_tokens: int = 0
    outlook: Outlook = Outlook()
