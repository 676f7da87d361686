"""`/debug/decisions`: asked of the loop when a client asks, and not before."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from engine.http.fake_loop import FakeLoop
from engine.http.front_process import FrontProcess

PATH = "/debug/decisions"


def complete(http: httpx.Client, tokens: int) -> None:
    body = {"model": "tiny", "prompt": [11, 12, 13], "max_tokens": tokens, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200


def decisions(http: httpx.Client, query: str = "") -> list[dict[str, Any]]:
    response = http.get(f"{PATH}{query}")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    found: list[dict[str, Any]] = response.json()["decisions"]
    return found


def test_before_any_there_are_none(http: httpx.Client, loop: FakeLoop) -> None:
    assert decisions(http) == []
    assert [asked.limit for asked in loop.asked] == [100]


def test_all_of_a_decision_is_told(http: httpx.Client) -> None:
    before_s = time.monotonic()
    complete(http, 1)
    answer = http.get(PATH).json()
    (only,) = answer["decisions"]
    assert before_s < only.pop("time_s") < answer["now_s"] < time.monotonic()
    assert only == {
        "why": {
            "reason": "scripted",
            "running": 1,
            "waiting": 0,
            "budget_s": 0.05,
            "step_s": 0.04,
            "slice_s": None,
            "lanes_tokens_s": None,
            "fused_tokens_s": None,
        },
        "partition": {"decode_units": 1, "prefill_units": 1},
        "fused": False,
        "decode_sequences": 1,
        "prefill_tokens": 0,
        "layers": None,
        "admitted": 0,
        "preempted": 0,
        "refused": [],
    }


def test_the_last_ones_newest_last(http: httpx.Client, loop: FakeLoop) -> None:
    complete(http, 8)
    every = decisions(http)
    times_s = [each["time_s"] for each in every]
    assert len(times_s) == 8
    assert times_s == sorted(times_s)
    assert decisions(http, "?limit=3") == every[-3:]
    assert decisions(http, "?limit=999999999") == every
    assert [asked.limit for asked in loop.asked] == [100, 3, 999999999]


def test_nobody_asks_unless_a_client_does(http: httpx.Client, loop: FakeLoop) -> None:
    complete(http, 3)
    http.get("/metrics")
    http.get("/ready")
    assert loop.asked == []


@pytest.mark.parametrize("limit", ["0", "-1", "", "many", "1.5", "+1", "%C2%B2", "1" * 10])
def test_a_limit_that_is_none(limit: str, http: httpx.Client, loop: FakeLoop) -> None:
    response = http.get(f"{PATH}?limit={limit}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"
    assert loop.asked == []


def test_many_at_once_each_get_their_own(http: httpx.Client, front: FrontProcess) -> None:
    complete(http, 6)
    found: dict[int, int] = {}

    def ask(limit: int) -> None:
        with httpx.Client(base_url=front.url, timeout=20) as client:
            found[limit] = len(decisions(client, f"?limit={limit}"))

    threads = [threading.Thread(target=ask, args=(limit,)) for limit in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {limit: limit for limit in range(1, 7)}


def test_a_loop_that_does_not_answer(http: httpx.Client, loop: FakeLoop) -> None:
    loop.ignore_questions()
    response = http.get(PATH)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_silent"
    complete(http, 2)


def test_when_the_core_dies_meanwhile(own_front: FrontProcess) -> None:
    own_front.loop.ignore_questions()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(own_front.http.get(PATH)))
    asking.start()
    own_front.loop.wait_until(lambda state: len(state.asked) == 1)
    own_front.kill_core()
    asking.join()
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(503, "engine_stopped")]
