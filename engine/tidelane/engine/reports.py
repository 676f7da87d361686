"""The engine's state in the words of its listeners: heartbeats for the front, status for the agent."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from tidelane.engine.channel import Ahead, Heartbeat, Moved, Tier
from tidelane.engine.estimation.reach import reach
from tidelane.engine.kv.cache import KVCache
from tidelane.engine.kv.moves import Fetch, Load, Spill, Store
from tidelane.engine.kv.traffic import Flow, PartRead, Traffic
from tidelane.engine.ledger import Ledger
from tidelane.engine.outlook import outlook
from tidelane.engine.pressure import Pressure
from tidelane.engine.scheduling.plan import Objective as SchedulingObjective
from tidelane.engine.usage import Usage, Use
from tidelane.engine.window import LatencySummary, LatencyWindow
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import ExecutionMode, LateRequests, Objective

_PRESSURES: Final = {
    Pressure.NONE: serving_pb2.Load.NONE,
    Pressure.WAITING: serving_pb2.Load.WAITING,
    Pressure.PREEMPTING: serving_pb2.Load.PREEMPTING,
    Pressure.REFUSING: serving_pb2.Load.REFUSING,
}


def scheduling_objective(objective: Objective) -> SchedulingObjective:
    refuse_late = objective.late_requests is LateRequests.REFUSE
    if objective.bounds is None:
        return SchedulingObjective(objective.slo, refuse_late=refuse_late)
    bounds = objective.bounds
    return SchedulingObjective(objective.slo, bounds.min_decode_share, bounds.max_decode_share, refuse_late)


def heartbeat(ledger: Ledger, usage: Usage, traffic: Traffic, objective: Objective, now_s: float) -> Heartbeat:
    usage.note(ledger.flight, now_s)
    decode, prefill = usage.nominal
    return Heartbeat(
        time_s=now_s,
        running=ledger.running,
        waiting=ledger.waiting,
        kv_blocks_total=ledger.pool.total,
        kv_blocks_free=ledger.pool.free,
        kv_blocks_idle=ledger.pool.device.idle,
        kv_evictions=ledger.pool.device.evictions,
        preemptions=ledger.preemptions,
        lane_moves=usage.border_moves,
        lane_moves_to=dict(usage.moves_to),
        compute_units=usage.units,
        decode_units=decode,
        prefill_units=prefill,
        busy_s={use.value: seconds for use, seconds in usage.seconds.items()},
        steps=ledger.steps,
        slo=objective.slo,
        mode=objective.mode,
        draining=ledger.draining,
        kv_tiers=_tiers(ledger.pool, traffic),
        kv_prefetched=_prefetched(ledger.pool),
        outlook=outlook(ledger.state(), usage.units, usage.nominal),
        streams_running=ledger.streams.running,
        streams_waiting=ledger.streams.waiting,
        streamed_bytes=traffic.of(PartRead).bytes,
    )


def _tiers(cache: KVCache, traffic: Traffic) -> dict[str, Tier]:
    stored, loaded = _moved(cache.stored_blocks, traffic.of(Store)), _moved(cache.loaded_blocks, traffic.of(Load))
    spilled, fetched = _moved(cache.spilled_blocks, traffic.of(Spill)), _moved(cache.fetched_blocks, traffic.of(Fetch))
    tiers = {
        "host": Tier(cache.host.total, cache.host.free, cache.host.evictions, stored, loaded, cache.host.pinned),
        "disk": Tier(cache.disk.total, cache.disk.free, cache.disk.evictions, spilled, fetched),
    }
    return {name: tier for name, tier in tiers.items() if tier.total}


def _prefetched(cache: KVCache) -> dict[str, Ahead]:
    if not cache.host.total:
        return {}
    by_tier = {"device": cache.device.guesses, "host": cache.host.guesses}
    return {name: Ahead(told.brought, told.useful, told.wasted) for name, told in by_tier.items()}


def _moved(blocks: int, flow: Flow) -> Moved:
    return Moved(blocks, flow.bytes, flow.seconds, flow.failed)


def engine_status(
    identity: serving_pb2.EngineStatus,
    state: serving_pb2.EngineStatus.State,
    ledger: Ledger,
    usage: Usage,
    window: LatencyWindow,
    objective: Objective,
    pressure: Pressure,
) -> serving_pb2.EngineStatus:
    status = serving_pb2.EngineStatus()
    status.CopyFrom(identity)
    status.state = state
    status.objective_revision = objective.revision
    status.resident_memory_bytes = resident_memory_bytes()
    status.load.CopyFrom(
        serving_pb2.Load(
            running=ledger.running,
            waiting=ledger.waiting,
            kv_blocks_total=ledger.pool.total,
            kv_blocks_free=ledger.pool.free,
            preemptions=ledger.preemptions,
            rejected=ledger.refusals.total(),
            kv_pressure=_PRESSURES[pressure],
        )
    )
    summary = window.summary(objective.slo.percentile)
    status.latency.CopyFrom(_latency(summary))
    if summary.input_tokens_p50:
        units = _units(usage, objective)
        found = reach(ledger.estimates, *units, summary.input_tokens_p50)
        status.reach.CopyFrom(
            serving_pb2.Reach(input_tokens=found.input_tokens, ttft_s=found.ttft_s, tpot_s=found.tpot_s)
        )
    status.lanes.CopyFrom(_lanes(usage))
    return status


def resident_memory_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _units(usage: Usage, objective: Objective) -> tuple[int, int]:
    """Those that decode and prefill can have with nothing beside them."""
    if objective.mode is ExecutionMode.DISAGGREGATED and all(usage.nominal):
        return usage.nominal
    return usage.units, usage.units


def _latency(summary: LatencySummary) -> serving_pb2.Latency:
    latency = serving_pb2.Latency(
        window_s=summary.window_s,
        requests=summary.attainment.requests,
        attainment=summary.attainment.share or 0.0,
        goodput_rps=summary.attainment.goodput_rps,
    )
    for field in (
        "ttft_p50_s",
        "ttft_p99_s",
        "tpot_p50_s",
        "tpot_p99_s",
        "token_gap_p99_s",
        "queue_p90_s",
        "queue_p99_s",
        "queue_at_percentile_s",
        "prefill_p50_s",
        "prefill_at_percentile_s",
        "ttft_at_percentile_s",
        "tpot_at_percentile_s",
        "ttft_target_ratio_at_percentile",
    ):
        setattr(latency, field, getattr(summary, field) or 0.0)
    return latency


def _lanes(usage: Usage) -> serving_pb2.Lanes:
    decode, prefill = usage.nominal
    realised = usage.realised()
    return serving_pb2.Lanes(
        compute_units=usage.units,
        decode_compute_units=decode,
        prefill_compute_units=prefill,
        realised_split_share=realised.shares[Use.SPLIT],
        realised_decode_alone_share=realised.shares[Use.DECODE_ALONE],
        realised_prefill_alone_share=realised.shares[Use.PREFILL_ALONE],
        realised_mixed_share=realised.shares[Use.MIXED],
        idle_share=realised.shares[Use.IDLE],
        realised_decode_unit_share=realised.decode_unit_share or 0.0,
        moves=usage.border_moves,
    )
