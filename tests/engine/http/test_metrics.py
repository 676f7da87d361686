from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from engine.http.fake_loop import PATIENCE_S, Script
from engine.http.front_process import FrontProcess
from tidelane.engine.channel import RefusalReason, Refused, Tokens
from tidelane.engine.http.metrics import Metrics
from tidelane.engine.request import FinishReason, NewToken, Request, Sampling
from tidelane.engine.slo import Slo, Timeline

TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.2 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 +Inf"
TPOT = (
    "0.002 0.004 0.006 0.008 0.01 0.015 0.02 0.025 0.03 0.04 0.05 0.06 0.08 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 "
    "5.0 10.0 +Inf"
)


class Scrape:
    def __init__(self, exposition: str) -> None:
        self.samples = [s for family in text_string_to_metric_families(exposition) for s in family.samples]

    def value(self, name: str, **labels: str) -> float:
        wanted = {"model_name": "tiny"} | labels
        (value,) = [s.value for s in self.samples if s.name == f"tidelane_{name}" and s.labels == wanted]
        return value

    def buckets(self, name: str) -> str:
        return " ".join(s.labels["le"] for s in self.samples if s.name == f"tidelane_{name}_bucket")


def scrape(http: httpx.Client) -> Scrape:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return Scrape(response.text)


def test_what_a_mixed_load_leaves_behind(own_front: FrontProcess, tokenizer: Tokenizer) -> None:
    http, loop = own_front.http, own_front.loop
    body = {"model": "tiny", "prompt": [40, 41, 42], "max_tokens": 4}
    loop.answer(Script(tokens=[50] * 4, cached_tokens=2))
    assert http.post("/v1/completions", json=body).status_code == 200
    loop.hold()
    loop.answer(Script(tokens=[50] * 4))
    with http.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "stop": tokenizer.decode([50])}
    ) as response:
        loop.step(1)
        response.read()
    loop.wait_for_aborts(1)
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        loop.step(1)
        next(response.iter_lines())  # left before its token has come, its prompt would not count
    loop.wait_for_aborts(2)
    loop.release()
    loop.answer(Script(refusal=Refused("", RefusalReason.QUEUE_FULL, "full", 1.0)))
    assert http.post("/v1/completions", json=body).status_code == 429
    loop.answer(Script(tokens=[50], ends_with=FinishReason.ERROR, error="x"))
    assert http.post("/v1/completions", json=body).status_code == 500

    metrics = scrape(http)
    ended = {r: metrics.value("request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert metrics.value("requests_refused_total", reason="queue_full") == 1
    assert metrics.value("prompt_tokens_total") == 12
    assert metrics.value("generation_tokens_total") == 4 + 1 + 1 + 1
    assert metrics.value("prefix_cache_queries_total") == 12
    assert metrics.value("prefix_cache_hits_total") == 2
    assert metrics.value("time_to_first_token_seconds_count") == 4
    assert metrics.value("inter_token_latency_seconds_count") == 3
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert metrics.value(f"{name}_seconds_count") == 2, name
    assert metrics.value("request_time_per_output_token_seconds_count") == 1
    assert metrics.value("request_prompt_tokens_sum") == 6
    assert metrics.value("request_generation_tokens_sum") == 5
    verdicts = [metrics.value("slo_requests_total", verdict=verdict) for verdict in ("met", "missed")]
    assert sum(verdicts) == 3, "finished and failed requests are judged, those that left are not"
    assert verdicts[1] >= 1
    assert metrics.value("http_responses_total", status="429") == 1


def test_what_the_heartbeat_says_is_shown(own_front: FrontProcess) -> None:
    own_front.loop.set_beat(
        running=3, waiting=7, kv_blocks_total=200, kv_blocks_free=50, kv_blocks_idle=20, preemptions=9
    )
    deadline_s = time.monotonic() + PATIENCE_S
    metrics = scrape(own_front.http)
    while metrics.value("num_requests_waiting") != 7:
        assert time.monotonic() < deadline_s
        metrics = scrape(own_front.http)
    assert metrics.value("num_requests_running") == 3
    assert metrics.value("kv_cache_usage_perc") == 0.75
    assert metrics.value("num_preemptions_total") == 9
    blocks = {state: metrics.value("kv_tier_blocks", tier="device", state=state) for state in ("used", "idle", "free")}
    assert blocks == {"used": 150, "idle": 20, "free": 30}
    assert metrics.value("lane_compute_units", lane="decode") == 1
    assert metrics.value("lane_compute_units", lane="prefill") == 1
    assert metrics.value("lane_switches_total") == 3
    assert metrics.value("lane_busy_seconds_total", kind="split") == 1.5
    assert metrics.value("slo_target_seconds", target="ttft") == 0.2


def test_buckets_are_those_that_dashboards_expect() -> None:
    metrics = Scrape(Metrics("tiny", lambda: None).exposition().decode())
    assert metrics.buckets("time_to_first_token_seconds") == TTFT
    assert metrics.buckets("inter_token_latency_seconds") == TPOT
    assert metrics.buckets("request_time_per_output_token_seconds") == TPOT


def request_of(**fields: Any) -> Request:
    return Request("r", (1,) * 100, 10, Sampling(seed=0), arrival_s=10.0, **fields)


class Beat:
    slo = Slo(ttft_s=0.2, tpot_s=0.05, ttft_per_1k_input_tokens_s=1.0)


@pytest.mark.parametrize(
    ("targets", "first_s", "last_s", "met"),
    [
        ({}, 10.29, 10.4, True),  # 200 ms and 100 ms more for 100 prompt tokens
        ({}, 10.31, 10.4, False),
        ({}, 10.2, 10.5, False),  # TPOT 75 ms
        ({"ttft_s": 0.2}, 10.29, 10.4, False),  # its own target comes without the allowance
        ({"tpot_s": 0.1}, 10.2, 10.5, True),
    ],
)
def test_a_request_is_judged_by_its_own_targets(
    targets: dict[str, float], first_s: float, last_s: float, met: bool
) -> None:
    metrics = Metrics("tiny", lambda: Beat())  # type: ignore[arg-type, return-value]
    record = metrics.begin(request_of(**targets))
    record.end(FinishReason.LENGTH, Timeline(10.0, 10.1, first_s, last_s, input_tokens=100, output_tokens=5))
    record.end(FinishReason.ABORTED)
    assert metrics._judged.labels("tiny", "met" if met else "missed")._value.get() == 1
    assert metrics._judged.labels("tiny", "missed" if met else "met")._value.get() == 0


def test_a_request_that_a_stop_string_ended_is_timed_by_its_messages() -> None:
    metrics = Metrics("tiny", lambda: Beat())  # type: ignore[arg-type, return-value]
    record = metrics.begin(request_of())
    token = NewToken(5)
    record.tokens(Tokens("r", (token,), 10.2, prefill_start_s=10.05))
    record.tokens(Tokens("r", (token, token), 10.3))
    record.end(FinishReason.STOP)
    assert metrics.ttft._sum.get() == pytest.approx(0.2)
    assert metrics.queue._sum.get() == pytest.approx(0.05)
    assert metrics.prefill._sum.get() == pytest.approx(0.15)
    assert metrics.tpot._sum.get() == pytest.approx(0.05)
    assert metrics.e2e._sum.get() == pytest.approx(0.3)
