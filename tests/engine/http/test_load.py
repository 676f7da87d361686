"""`/load`: what a router is told of an engine."""

from __future__ import annotations

import httpx
import msgspec

from engine.http.fake_loop import FakeLoop
from tidelane.engine.load import Load, Outlook
from tidelane.engine.slo import Slo


def load(http: httpx.Client) -> Load:
    response = http.get("/load")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return msgspec.json.decode(response.content, type=Load)


def beat_heard(http: httpx.Client, loop: FakeLoop, kv_blocks_free: int) -> Load:
    for _ in range(2000):
        if (found := load(http)).kv_free_tokens == kv_blocks_free * loop.facts.kv_pool_tokens // 100:
            return found
    raise AssertionError("the heartbeat never came")


def test_what_the_loop_said_last_is_told(http: httpx.Client, loop: FakeLoop) -> None:
    outlook = Outlook({"default": 812, "flex": 40}, {"default": 3, "flex": 1}, 640.0, 0.05, 0.002)
    loop.set_beat(kv_blocks_free=40, outlook=outlook)
    told = beat_heard(http, loop, 40)
    assert told.outlook == outlook
    assert (told.model, told.ready, told.draining, told.reason) == ("tiny", True, False, None)
    assert told.slo == Slo(ttft_s=0.2, tpot_s=0.05, ttft_per_1k_input_tokens_s=0.1)
    assert told.max_context_tokens == loop.facts.max_context_tokens
    assert told.kv_tokens == told.kv_kept_tokens == loop.facts.kv_pool_tokens
    assert told.age_s < 5.0
    assert http.get("/load").json()["started_s"] == http.get("/v1/models").json()["data"][0]["created"]


def test_an_engine_that_drains_says_so(http: httpx.Client, loop: FakeLoop) -> None:
    loop.set_beat(draining=True, kv_blocks_free=30)
    told = beat_heard(http, loop, 30)
    assert told.draining
    assert not told.ready
    assert told.reason == "This server finishes its work and stops."
