from __future__ import annotations

import time
from pathlib import Path

import httpx
import openai
import pytest

from engine.http.fake_loop import PATIENCE_S, FakeLoop, Script
from engine.http.front_process import SERVED_NAME, FrontProcess
from engine.http.tiny_model import facts_of
from tidelane.engine.channel import RefusalReason, Refused
from tidelane.engine.request import ServiceTier

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def refusal(reason: RefusalReason, retry_after_s: float | None = None) -> Script:
    return Script(refusal=Refused("", reason, f"refused: {reason}", retry_after_s))


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_429_with_retry_after(http: httpx.Client, loop: FakeLoop, stream: bool) -> None:
    loop.answer(refusal(RefusalReason.QUEUE_FULL, 2.1))
    response = http.post("/v1/completions", json=BODY | {"stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "queue_full"
    assert response.json()["error"]["type"] == "rate_limit_error"


def refused_late(http: httpx.Client) -> float:
    series = 'tidelane_requests_refused_total{model_name="tiny",reason="would_be_late"} '
    (value,) = [line.removeprefix(series) for line in http.get("/metrics").text.splitlines() if line.startswith(series)]
    return float(value)


@pytest.mark.parametrize("stream", [True, False])
def test_who_would_be_late_gets_a_429_though_it_asked_for_a_stream(
    http: httpx.Client, loop: FakeLoop, stream: bool
) -> None:
    before = refused_late(http)
    loop.answer(refusal(RefusalReason.WOULD_BE_LATE, 7.0))
    response = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "would_be_late")
    assert refused_late(http) == before + 1


def test_one_refused_choice_refuses_the_call_and_aborts_the_accepted(http: httpx.Client, loop: FakeLoop) -> None:
    loop.hold()
    loop.answer(Script(), refusal(RefusalReason.QUEUE_FULL), Script())
    response = http.post("/v1/completions", json=BODY | {"n": 3})
    assert response.status_code == 429
    assert {abort.request_id for abort in loop.wait_for_aborts(2)} == {loop.submitted[0].id, loop.submitted[2].id}


def test_what_never_fits_the_pool_is_400(http: httpx.Client, loop: FakeLoop) -> None:
    loop.answer(refusal(RefusalReason.NEVER_FITS))
    response = http.post("/v1/completions", json=BODY)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "refused: never_fits"


def test_more_choices_than_the_queue_ever_holds_are_400(model_folder: Path, tmp_path: Path) -> None:
    front = FrontProcess(tmp_path, facts_of(model_folder, SERVED_NAME, queue_limit=3))
    try:
        front.wait_until_ready()
        assert front.http.post("/v1/completions", json=BODY | {"n": 3}).status_code == 200
        for fields in ({"n": 4}, {"n": 2, "prompt": ["a", "b"]}):
            response = front.http.post("/v1/completions", json=BODY | fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "n"
            assert response.json()["error"]["message"] == "The number of prompts times `n` must be at most 3; got 4."
        assert len(front.loop.submitted) == 3
    finally:
        front.stop()


def test_the_openai_client_obeys_retry_after_and_succeeds(front: FrontProcess, loop: FakeLoop) -> None:
    loop.answer(refusal(RefusalReason.QUEUE_FULL, 0.4), Script(tokens=[40]))
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=1) as client:
        began_s = time.monotonic()
        answer = client.completions.create(model="tiny", prompt="hi")
    assert time.monotonic() - began_s >= 1.0
    assert answer.choices[0].finish_reason == "length"
    assert len(loop.submitted) == 2


def test_draining_refuses_new_requests_and_lets_open_ones_finish(http: httpx.Client, loop: FakeLoop) -> None:
    loop.hold()
    with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        loop.wait_for_submissions(1)
        loop.set_beat(draining=True)
        wait_for_status(http, "/ready", 503)
        refused = http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        loop.release()
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert len(loop.submitted) == 1


def test_a_request_that_meets_the_drain_on_its_way_is_503(http: httpx.Client, loop: FakeLoop) -> None:
    loop.answer(refusal(RefusalReason.DRAINING))
    assert http.post("/v1/completions", json=BODY).status_code == 503


def wait_for_status(http: httpx.Client, path: str, status: int) -> httpx.Response:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        response = http.get(path)
        if response.status_code == status:
            return response
        time.sleep(0.02)
    raise AssertionError(f"{path} never answered {status}")


def test_silence_of_the_loop_makes_it_unready(http: httpx.Client, loop: FakeLoop) -> None:
    loop.set_beat(beating=False)
    assert "no sign of life" in wait_for_status(http, "/ready", 503).json()["reason"]
    assert http.get("/health").status_code == 200


def test_more_than_the_context_holds_is_400(http: httpx.Client, loop: FakeLoop) -> None:
    for path, body, param in [
        ("/v1/completions", BODY | {"prompt": [5] * 600}, "prompt"),
        ("/v1/completions", BODY | {"prompt": [5] * 510}, "prompt"),
        ("/v1/completions", BODY | {"max_tokens": 10**30}, "prompt"),
        ("/v1/chat/completions", CHAT | {"max_tokens": 512}, "messages"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        # By its length alone, before it is tokenised.
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        ("/v1/completions", BODY | {"prompt": "x" * 10**6}, "prompt"),
        ("/v1/completions", BODY | {"prompt": ["hi", "x" * 10**6]}, "prompt"),
        ("/v1/completions", BODY | {"prompt": [5] * 10**6}, "prompt"),
        ("/v1/completions", BODY | {"prompt": ["hi"] * 513}, "prompt"),
    ]:
        response = http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "512" in error["message"]
    assert loop.submitted == [], "a request over the limit must not reach the loop, cut or not"


def test_a_prompt_that_just_fits_is_served(http: httpx.Client, loop: FakeLoop) -> None:
    assert http.post("/v1/completions", json=BODY | {"prompt": [5] * 507}).status_code == 200
    assert (len(loop.submitted[0].prompt), loop.submitted[0].max_new_tokens) == (507, 5)


def test_without_max_tokens_a_chat_may_fill_the_context(http: httpx.Client, loop: FakeLoop) -> None:
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    request = loop.submitted[0]
    assert request.max_new_tokens == 512 - len(request.prompt)


def test_without_max_tokens_a_completion_has_openais_default(http: httpx.Client, loop: FakeLoop) -> None:
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
    assert loop.submitted[0].max_new_tokens == 16


def test_the_newer_name_of_max_tokens_wins(http: httpx.Client, loop: FakeLoop) -> None:
    body = CHAT | {"max_tokens": 9, "max_completion_tokens": 4}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert loop.submitted[0].max_new_tokens == 4


@pytest.mark.parametrize(
    ("asked", "tier"),
    [
        ("auto", ServiceTier.DEFAULT),
        ("default", ServiceTier.DEFAULT),
        ("priority", ServiceTier.PRIORITY),
        ("flex", ServiceTier.FLEX),
    ],
)
def test_service_tier_reaches_the_loop_and_is_told(
    http: httpx.Client, loop: FakeLoop, asked: str, tier: ServiceTier
) -> None:
    response = http.post("/v1/completions", json=BODY | {"service_tier": asked})
    assert response.json()["service_tier"] == tier.value
    assert loop.submitted[0].tier is tier


def test_the_salt_of_a_request_reaches_the_loop(http: httpx.Client, loop: FakeLoop) -> None:
    assert http.post("/v1/completions", json=BODY | {"cache_salt": "tenant"}).status_code == 200
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert [request.cache_salt for request in loop.submitted] == ["tenant", ""]


def test_latency_targets_come_from_headers(http: httpx.Client, loop: FakeLoop) -> None:
    headers = {"x-slo-ttft-ms": "150", "X-SLO-TPOT-MS": "12.5"}
    assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    assert http.post("/v1/completions", json=BODY).status_code == 200
    first, second = loop.submitted
    assert (first.ttft_s, first.tpot_s) == (0.15, 0.0125)
    assert (second.ttft_s, second.tpot_s) == (None, None)


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast", "", "1e99"])
def test_targets_that_are_no_time_are_400(http: httpx.Client, name: str, value: str) -> None:
    response = http.post("/v1/completions", json=BODY, headers={name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_arrival_is_stamped_on_the_shared_clock(http: httpx.Client, loop: FakeLoop) -> None:
    before_s = time.monotonic()
    http.post("/v1/completions", json=BODY)
    assert before_s <= loop.submitted[0].arrival_s <= time.monotonic()
