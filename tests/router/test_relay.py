"""The router on a real port before backends that misbehave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from router.conftest import NEVER, StartBackend, StartRouter
from router.scripted import (
    DONE,
    LAST_CHUNK,
    PATIENCE_S,
    SSE_HEAD,
    Answering,
    Call,
    ScriptedBackend,
    chunk,
    error,
    event,
    whole,
)
from tidelane.engine.load import Outlook

BODY = {"model": "chat", "prompt": "hello", "stream": True}
PATH = "/v1/completions"


async def hang(call: Call) -> None:
    await call.ended.wait()


async def reset(call: Call) -> None:
    call.reset()


def then(*said: bytes, after: Answering = hang) -> Answering:
    async def answer(call: Call) -> None:
        for data in said:
            call.say(data)
        await call.writer.drain()
        await after(call)

    return answer


def stream(*texts: str) -> bytes:
    return SSE_HEAD + b"".join(chunk(event(text)) for text in texts) + chunk(DONE) + LAST_CHUNK


def busy(backend: ScriptedBackend, queued_tokens: int) -> None:
    """So that others come first."""
    backend.say(outlook=Outlook({"default": queued_tokens}, {"default": 5}, 1000.0, 0.01, 0.001))


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post(PATH, json=BODY | fields)


@pytest.fixture
async def first(start_backend: StartBackend) -> ScriptedBackend:
    """Chosen first."""
    return await start_backend()


@pytest.fixture
async def second(start_backend: StartBackend) -> ScriptedBackend:
    backend = await start_backend()
    busy(backend, 100)
    return backend


# ---- what passes through -------------------------------------------------------------------------------------------


async def test_a_stream_passes_piece_by_piece_as_it_comes(first: ScriptedBackend, start_router: StartRouter) -> None:
    more = asyncio.Event()

    async def answer(call: Call) -> None:
        call.say(SSE_HEAD + chunk(event("one")))
        await more.wait()
        call.say(chunk(event("two")) + chunk(DONE) + LAST_CHUNK)

    first.answering = answer
    router = await start_router(first.url)
    async with router.http.stream("POST", PATH, json=BODY) as response:
        pieces = response.aiter_raw()
        assert await anext(pieces) == event("one")
        more.set()
        assert b"".join([piece async for piece in pieces]) == event("two") + DONE
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert await router.metric("requests_total", backend=first.name, outcome="answered") == 1
    assert await router.metric("ttft_seconds_count") == 1


async def test_headers_go_through_but_for_those_of_a_connection(
    first: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answer(whole(200, {"id": "x"}, "x-mine: 1", "x-hop: 2", "connection: x-hop, close", "server: theirs"))
    router = await start_router(first.url)
    sent = {"x-slo-ttft-ms": "300", "authorization": "Bearer k", "x-request-id": "mine", "te": "trailers",
        "connection": "keep-alive, x-only-here", "x-only-here": "1"}  # fmt: skip
    response = await router.http.post(f"{PATH}?a=b%20c", json=BODY, headers=sent)
    assert response.json() == {"id": "x"}
    assert response.headers["x-mine"] == "1"
    assert "x-hop" not in response.headers
    assert response.headers.get_list("server") == ["uvicorn"]
    assert response.headers.get_list("x-request-id") == ["mine"]
    (call,) = first.calls
    assert call.head.startswith(b"POST /v1/completions?a=b%20c HTTP/1.1\r\n")
    kept = {name: call.header(name) for name in ("x-slo-ttft-ms", "authorization", "x-request-id", "host")}
    assert kept == {"x-slo-ttft-ms": "300", "authorization": "Bearer k", "x-request-id": "mine", "host": first.name}
    assert (call.header("te"), call.header("x-only-here"), call.header("connection")) == (None, None, "close")
    assert json.loads(call.body) == BODY


async def test_a_request_without_an_id_gets_one_that_both_sides_see(
    first: ScriptedBackend, start_router: StartRouter
) -> None:
    router = await start_router(first.url)
    response = await post(router.http)
    assert first.calls[0].header("x-request-id") == response.headers["x-request-id"]
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_the_work_at_once(
    begun: bool, first: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answering = then(SSE_HEAD + chunk(event("one"))) if begun else hang
    router = await start_router(first.url)

    async def ask() -> None:
        async with router.http.stream("POST", PATH, json=BODY) as response:
            async for _ in response.aiter_raw():
                pass

    asking = asyncio.create_task(ask())
    call = await first.called()
    if begun:
        async with asyncio.timeout(PATIENCE_S):
            while not await router.metric("ttft_seconds_count"):
                pass
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await call.ended.wait()
        while not await router.metric("requests_total", outcome="client_left"):
            pass
    assert await router.metric("in_flight", backend=first.name) == 0


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_answer_that_another_would_give_too_is_passed_on(
    status: int, first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answer(error(status, "no"))
    router = await start_router(first.url, second.url)
    response = await post(router.http)
    assert (response.status_code, response.json()["error"]["code"]) == (status, "no")
    assert not second.calls


# ---- what is tried again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        (reset, "broken_off"),
        (then(SSE_HEAD, after=reset), "broken_off"),
        (then(SSE_HEAD + chunk(b'data: {"error":{"code":"engine_stopped"}}\n\n') + LAST_CHUNK), "broken_off"),
        (then(SSE_HEAD + LAST_CHUNK), "broken_off"),
        (then(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", after=reset), "broken_off"),
        (then(b"what?\r\n\r\n"), "broken_off"),
        (then(error(503, "draining", "retry-after: 5")), "closed"),
        (then(error(429, "queue_full", "retry-after: 5")), "busy"),
    ],
)
async def test_before_the_first_byte_another_is_asked(
    fault: Answering, ended: str, first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answering = fault
    second.answer(stream("fine"))
    router = await start_router(first.url, second.url)
    response = await post(router.http)
    assert response.status_code == 200
    assert response.content == event("fine") + DONE
    assert len(first.calls) == len(second.calls) == 1
    assert await router.metric("retries_total", reason=ended) == 1
    assert await router.metric("requests_total", backend=first.name, outcome=ended) == 1


async def test_where_nothing_listens_another_is_asked_and_it_is_left_alone(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    second.answer(stream("fine"))
    router = await start_router(first.url, second.url)
    await first.stop()
    for _ in range(3):
        assert (await post(router.http)).content == event("fine") + DONE
    assert await router.metric("retries_total", reason="unreachable") == 1
    assert await router.metric("backend_up", backend=first.name) == 0


async def test_one_that_closes_gets_no_more_until_it_says_otherwise(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answer(error(503, "draining"))
    router = await start_router(first.url, second.url)
    for _ in range(3):
        assert (await post(router.http)).status_code == 200
    assert len(first.calls) == 1
    await router.poll()
    await post(router.http)
    assert len(first.calls) == 2


async def test_what_one_that_hangs_has_not_begun_is_asked_of_another(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    second.answer(stream("fine"))
    router = await start_router(first.url, second.url, rhythm=replace(NEVER, poll_timeout_s=0.5, silent_s=0.0))
    first.answering = then(SSE_HEAD)
    waiting = asyncio.create_task(post(router.http))
    await first.called()
    first.hanging = True
    await router.poll()
    assert (await waiting).content == event("fine") + DONE
    assert await router.metric("retries_total", reason="broken_off") == 1
    async with asyncio.timeout(PATIENCE_S):
        await first.calls[0].ended.wait()


async def test_a_request_that_two_broke_off_of_is_given_to_no_third(
    first: ScriptedBackend, second: ScriptedBackend, start_backend: StartBackend, start_router: StartRouter
) -> None:
    third = await start_backend()
    busy(third, 200)
    first.answering = second.answering = reset
    router = await start_router(first.url, second.url, third.url)
    response = await post(router.http)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "backend_lost"
    assert not third.calls


async def test_no_more_are_asked_than_allowed(
    first: ScriptedBackend, second: ScriptedBackend, start_backend: StartBackend, start_router: StartRouter
) -> None:
    third = await start_backend()
    busy(third, 200)
    for each, seconds in ((first, 7), (second, 3)):
        each.answer(error(503, "loading", f"retry-after: {seconds}"))
    router = await start_router(first.url, second.url, third.url, most_tries=2)
    response = await post(router.http)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["code"] == "loading"
    assert not third.calls


async def test_who_is_too_busy_says_so_where_no_other_would_answer_sooner(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    busy(second, 20_000)  # 20 s, for a target of one
    first.answer(error(429, "would_be_late", "retry-after: 4"))
    router = await start_router(first.url, second.url)
    response = await post(router.http)
    assert (response.status_code, response.headers["retry-after"]) == (429, "4")
    assert not second.calls
    first.answer(error(429, "would_be_late", "retry-after: 60"))
    assert (await post(router.http)).status_code == 200
    assert len(second.calls) == 1


async def test_of_all_that_are_busy_the_soonest_time_is_told(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answer(error(429, "queue_full", "retry-after: 9"))
    second.answer(error(429, "queue_full", "retry-after: 2"))
    router = await start_router(first.url, second.url)
    response = await post(router.http)
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


async def test_after_the_first_byte_a_stream_ends_with_one_error_event(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answering = then(SSE_HEAD + chunk(event("one")), after=reset)
    router = await start_router(first.url, second.url)
    response = await post(router.http)
    begun, *rest = [line for line in response.text.split("\n") if line]
    assert f"{begun}\n\n".encode() == event("one")
    (last,) = rest
    told = json.loads(last.removeprefix("data: "))["error"]
    assert (told["code"], told["type"]) == ("backend_lost", "server_error")
    assert not second.calls
    assert await router.metric("requests_total", backend=first.name, outcome="stream_lost") == 1


async def test_a_backend_that_fails_again_and_again_is_left_alone(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answering = reset
    router = await start_router(first.url, second.url)
    for _ in range(5):
        assert (await post(router.http)).status_code == 200
    assert len(first.calls) == 3
    assert await router.metric("ejections_total", backend=first.name) == 1
    shown = {each["name"]: each for each in (await router.http.get("/debug/backends")).json()["backends"]}
    assert (shown[first.name]["ejected"], shown[first.name]["fitness"]) == (True, "doubtful")


# ---- choice --------------------------------------------------------------------------------------------------------


async def test_the_same_beginning_goes_to_the_same_backend(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter
) -> None:
    router = await start_router(first.url, second.url)
    long = "once upon a time " * 40
    await post(router.http, prompt=long)
    busy(first, 200)
    await router.poll()
    await post(router.http, prompt=long + "there was")
    await post(router.http, prompt="something else")
    assert (len(first.calls), len(second.calls)) == (2, 1)
    assert await router.metric("choices_total", reason="prefix") == 1
    assert await router.metric("resident_tokens_total") == len(long) // 256 * 64


async def test_a_model_is_asked_where_it_is_served(start_backend: StartBackend, start_router: StartRouter) -> None:
    chat, code = await start_backend("chat"), await start_backend("code")
    router = await start_router(chat.url, code.url)
    await post(router.http, model="code")
    assert (len(chat.calls), len(code.calls)) == (0, 1)
    listed = (await router.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["max_model_len"]) for each in listed] == [("chat", 2048), ("code", 2048)]
    assert (await router.http.get("/v1/models/code")).json()["id"] == "code"
    for refused in (await post(router.http, model="x"), await router.http.get("/v1/models/x")):
        assert refused.status_code == 404
        assert refused.json()["error"] == {
            "message": "The model 'x' does not exist; this router serves 'chat', 'code'.",
            "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }  # fmt: skip


# ---- refusals of its own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [(b"{", "application/json", 400), (b"[]", "application/json", 400), (b"{}", "text/plain", 415)],
)
async def test_what_is_no_request_is_refused_as_by_a_front(
    content: bytes, content_type: str, status: int, first: ScriptedBackend, start_router: StartRouter
) -> None:
    router = await start_router(first.url)
    response = await router.http.post(PATH, content=content, headers={"content-type": content_type})
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not first.calls


async def test_with_no_backend_it_is_not_ready_and_says_so(start_router: StartRouter) -> None:
    router = await start_router("http://127.0.0.1:9")  # discard: nobody listens there
    response = await router.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["reason"] == "None of 1 backends takes requests."
    assert (await router.http.get("/health")).status_code == 200
    refused = await post(router.http)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "no_backend"


async def test_what_is_no_engine_gets_nothing_while_there_is_one(
    first: ScriptedBackend, second: ScriptedBackend, start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    first.load = None
    router = await start_router(first.url, second.url)
    await post(router.http)
    assert (len(first.calls), len(second.calls)) == (0, 1)
    assert f"{first.name}: tells no load: GET /load answers 404: is it a Tidelane engine?" in caplog.messages


# ---- the end -------------------------------------------------------------------------------------------------------


async def test_drained_it_takes_nothing_new_and_ends_its_streams(
    first: ScriptedBackend, start_router: StartRouter
) -> None:
    more = asyncio.Event()

    async def answer(call: Call) -> None:
        call.say(SSE_HEAD + chunk(event("one")))
        await more.wait()
        call.say(chunk(DONE) + LAST_CHUNK)

    first.answering = answer
    router = await start_router(first.url)
    async with router.http.stream("POST", PATH, json=BODY) as response:
        pieces = response.aiter_raw()
        await anext(pieces)
        router.serving.drain()
        async with asyncio.timeout(PATIENCE_S):
            while await listens(router.url):
                await asyncio.sleep(0.01)
        more.set()
        assert b"".join([piece async for piece in pieces]) == DONE


async def test_past_the_deadline_streams_end_with_one_error_event(
    first: ScriptedBackend, start_router: StartRouter
) -> None:
    first.answering = then(SSE_HEAD + chunk(event("one")))
    router = await start_router(first.url, drain_s=0.0)
    async with router.http.stream("POST", PATH, json=BODY) as response:
        pieces = response.aiter_raw()
        await anext(pieces)
        router.serving.drain()
        rest = b"".join([piece async for piece in pieces])
    told = json.loads(rest.strip().removeprefix(b"data: "))["error"]
    assert (told["code"], told["message"]) == ("draining", "This router stops.")
    async with asyncio.timeout(PATIENCE_S):
        await first.calls[0].ended.wait()


async def listens(url: str) -> bool:
    target = httpx.URL(url)
    try:
        _, writer = await asyncio.open_connection(target.host, target.port)
    except OSError:
        return False
    writer.close()
    return True
