"""`/load`: the front's last heartbeat in the words that a router needs."""

from __future__ import annotations

from tidelane.engine.http.service import Service
from tidelane.engine.load import Load


def load_of(service: Service, started_s: int) -> Load:
    reason = service.unready()
    beat = service.link.heartbeat
    load = Load(service.served_name, started_s, ready=reason is None, draining=False, reason=reason)
    if beat is None or service.model is None:
        return load
    facts = service.model.facts
    block_tokens = facts.kv_pool_tokens / max(1, beat.kv_blocks_total)
    kept_blocks = beat.kv_blocks_total + sum(tier.total for tier in beat.kv_tiers.values())
    return Load(
        model=load.model,
        started_s=load.started_s,
        ready=load.ready,
        draining=beat.draining,
        reason=load.reason,
        age_s=max(0.0, service.monotonic_s() - beat.time_s),
        slo=beat.slo,
        max_context_tokens=facts.max_context_tokens,
        kv_tokens=facts.kv_pool_tokens,
        kv_free_tokens=int(beat.kv_blocks_free * block_tokens),
        kv_kept_tokens=int(kept_blocks * block_tokens),
        outlook=beat.outlook,
    )
