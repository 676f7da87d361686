"""What the loop's books come to in `/metrics`."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidelane.engine.estimation.reach import reach
from tidelane.engine.http.metrics import Metrics
from tidelane.engine.kv.keys import TokenNames, namespace
from tidelane.engine.kv.moves import Fetch, Load, Move, Spill, Store
from tidelane.engine.kv.retention import Guesses
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.pressure import Pressure
from tidelane.engine.reports import engine_status, heartbeat
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.window import LatencyWindow
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import ExecutionMode, Objective

from .virtual import World, request

FIGURES = ("kv_moved_blocks_total", "kv_moved_bytes_total", "kv_moving_seconds_total", "kv_failed_moves_total")


def by_tier_and_way(exposition: str) -> dict[tuple[str, str], list[float]]:
    samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    return {
        (tier, way): [
            sample.value
            for figure in FIGURES
            for sample in samples
            if sample.name == f"tidelane_{figure}" and sample.labels == {"model_name": "tiny", "tier": tier, "way": way}
        ]
        for tier in ("host", "disk")
        for way in ("store", "load")
    }


def test_what_moved_between_tiers_is_shown_by_tier_and_way() -> None:
    world = World(names=TokenNames(namespace("test"), 4), blocks=10, host_slots=9, disk_slots=40)
    world.submit(request("first", 22, 3))
    world.run()
    for first in (300, 0):  # others crowd it out; then it comes back, from the disk by host memory
        world.submit(request(f"at {first}", 36 if first else 22, 1, first=first))
        world.run()
    cache = world.ledger.pool
    blocks = [cache.stored_blocks, cache.loaded_blocks, cache.spilled_blocks, cache.fetched_blocks]
    assert min(blocks) > 0

    clock = VirtualClock()
    traffic = Traffic(clock)
    kinds: tuple[type[Move], ...] = (Store, Load, Spill, Fetch)
    for seconds, kind in enumerate(kinds, 1):
        with traffic.copying(kind):
            clock.now_s += seconds
        traffic.ended(kind, 1, 1000 * seconds)
        traffic.ended(kind, 10 * seconds, None)
    cache.device.guesses = Guesses(brought=7, useful=4, wasted=2)
    cache.host.guesses = Guesses(brought=9, useful=5, wasted=3)
    objective = Objective(Slo(ttft_s=2, tpot_s=0.2), ExecutionMode.LANES)
    beat = heartbeat(world.ledger, world.usage, traffic, objective, world.clock())
    exposition = Metrics("tiny", lambda: beat).exposition().decode()
    assert by_tier_and_way(exposition) == {
        ("host", "store"): [blocks[0], 1000, 1, 10],
        ("host", "load"): [blocks[1], 2000, 2, 20],
        ("disk", "store"): [blocks[2], 3000, 3, 30],
        ("disk", "load"): [blocks[3], 4000, 4, 40],
    }
    for figure, on_device, in_host in (("ed", 7, 9), ("ed_useful", 4, 5), ("ed_wasted", 2, 3)):
        for tier, blocks_of in (("device", on_device), ("host", in_host)):
            name = f'tidelane_kv_prefetch{figure}_blocks_total{{model_name="tiny",tier="{tier}"}}'
            assert f"{name} {blocks_of}.0\n" in exposition


def test_the_agent_hears_what_is_within_reach_of_the_median_prompt() -> None:
    world = World()
    objective, window = Objective(Slo(ttft_s=2, tpot_s=0.2), ExecutionMode.LANES), LatencyWindow(world.clock)

    def status() -> serving_pb2.EngineStatus:
        identity, ready = serving_pb2.EngineStatus(), serving_pb2.EngineStatus.READY
        return engine_status(identity, ready, world.ledger, world.usage, window, objective, Pressure.NONE)

    assert not status().HasField("reach")
    for input_tokens in (10, 22, 900):
        window.add(Timeline(0.0, 0.1, 0.2, 1.0, input_tokens, 9), objective.slo)
    found, units = status().reach, world.usage.units
    expected = reach(world.ledger.estimates, units, units, 22)
    assert (found.input_tokens, found.ttft_s, found.tpot_s) == (22, expected.ttft_s, expected.tpot_s)
    assert expected.tpot_s > 0


def test_the_agent_hears_how_long_prompts_waited() -> None:
    world = World()
    objective = Objective(Slo(ttft_s=2, tpot_s=0.2, percentile=50), ExecutionMode.LANES)
    window = LatencyWindow(world.clock)
    for queue_s, prefill_s in ((0.1, 0.4), (0.2, 0.5), (0.3, 0.6)):
        window.add(Timeline(0.0, queue_s, queue_s + prefill_s, 2.0, 10, 9), objective.slo)
    identity, ready = serving_pb2.EngineStatus(), serving_pb2.EngineStatus.READY
    latency = engine_status(identity, ready, world.ledger, world.usage, window, objective, Pressure.NONE).latency
    assert (latency.queue_at_percentile_s, latency.queue_p90_s) == (0.2, 0.3)
    assert (latency.prefill_p50_s, latency.prefill_at_percentile_s) == pytest.approx((0.5, 0.5))
