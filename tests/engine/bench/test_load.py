"""The generator against a server that answers exactly as told."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from engine.bench.sse_server import DONE, END, ROLE, SSE_HEAD, Script, SseServer, closing, piece, refusal, text
from tidelane.engine.bench.client import CannotAsk
from tidelane.engine.bench.load import Progress, generate
from tidelane.engine.bench.outcome import Failure, Outcome
from tidelane.engine.bench.traffic import Arrival, Traffic

ONE = Traffic((Arrival(0.0, 5, 8),), 1.0)


async def outcome_of(*script: bytes | None, timeout_s: float = 30.0) -> Outcome:
    async with SseServer(lambda body: script).running() as server:
        run = await generate(server.url, "m", ONE, timeout_s=timeout_s)
    return run.outcomes[0]


async def test_what_is_asked() -> None:
    server = SseServer(lambda body: (SSE_HEAD, piece(text("a", 1), DONE), END))
    async with server.running():
        await generate(server.url, "m", ONE, seed=4)
        await generate(server.url + "/v1", "m", ONE, seed=4, ignore_eos=False)
    strict, plain = server.bodies
    assert strict["model"] == "m"
    assert len(strict["messages"][0]["content"].split()) == 5
    assert strict["max_tokens"] == 8
    assert strict["ignore_eos"] is True
    assert strict["stream"] is True
    assert "ignore_eos" not in plain
    assert plain["messages"] == strict["messages"]  # one seed, one prompt
    assert "service_tier" not in plain


async def test_a_kind_of_a_tier_asks_for_it() -> None:
    server = SseServer(lambda body: (SSE_HEAD, piece(text("a", 1), DONE), END))
    async with server.running():
        await generate(server.url, "m", Traffic((Arrival(0.0, 5, 8, tier="flex"),), 1.0))
    assert [body["service_tier"] for body in server.bodies] == ["flex"]


def counting(body: dict[str, Any], template: int, per_word: int) -> Script:
    """A server whose template adds `template` tokens and to which each word is `per_word`."""
    tokens = template + per_word * len(body["messages"][0]["content"].split())
    usage = {"prompt_tokens": tokens, "completion_tokens": 1}
    return (SSE_HEAD, piece(text("a") | {"usage": usage}, {"choices": [], "usage": usage}, DONE), END)


@pytest.mark.parametrize(("template", "per_word", "told"), [(30, 1, 300), (0, 1, 300), (11, 3, 299)])
async def test_prompts_are_measured_by_what_the_server_counts(template: int, per_word: int, told: int) -> None:
    traffic = Traffic((Arrival(0.0, 300, 1),), 1.0)
    async with SseServer(lambda body: counting(body, template, per_word)).running() as server:
        run = await generate(server.url, "m", traffic, exact_prompts=True)
    (outcome,) = run.outcomes
    assert outcome.input_tokens == told  # as near as whole words come
    assert len(server.bodies) == 3
    assert [body["max_tokens"] for body in server.bodies[:2]] == [1, 1]
    assert outcome.sent_s < 0.5  # time starts after the measuring


async def test_a_server_that_refuses_what_is_asked_is_told_at_once() -> None:
    async with SseServer(lambda body: (refusal(404, "no model 'm'"),)).running() as server:
        with pytest.raises(CannotAsk, match="404: no model 'm'"):
            await generate(server.url, "m", Traffic((Arrival(0.0, 5, 8),) * 20, 1.0), exact_prompts=True)
    assert len(server.bodies) == 1


async def test_a_server_that_counts_nothing_is_asked_by_words() -> None:
    script = (SSE_HEAD, piece(text("a"), DONE), END)
    async with SseServer(lambda body: script).running() as server:
        await generate(server.url, "m", ONE, exact_prompts=True)
    assert len(server.bodies[-1]["messages"][0]["content"].split()) == 5
    assert len(server.bodies) == 2


async def test_tokens_are_counted_by_usage_and_not_by_pieces_of_text() -> None:
    outcome = await outcome_of(
        SSE_HEAD,
        piece(ROLE, text("he", 1)),
        piece(text("llo", 4)),  # three tokens at once
        piece(text("", 5)),  # a token that shows nothing yet
        piece(closing(6), DONE),
        END,
    )
    assert outcome.failure is None
    assert outcome.output_tokens == 6
    assert outcome.input_tokens == 7
    assert len(outcome.token_times_s) == 3
    assert list(outcome.token_times_s) == sorted(outcome.token_times_s)
    assert 0 <= outcome.sent_s <= outcome.token_times_s[0] <= outcome.ended_s


async def test_without_usage_pieces_of_text_count() -> None:
    outcome = await outcome_of(SSE_HEAD, piece(ROLE), piece(text("a")), piece(text("b"), text("c")), piece(DONE), END)
    assert outcome.output_tokens == 3
    assert outcome.input_tokens is None
    timeline = outcome.timeline()
    assert timeline is not None
    assert timeline.input_tokens == 5  # what was planned stands in


async def test_events_may_be_cut_anywhere() -> None:
    whole = b"data: " + b'{"choices": [{"index": 0, "delta": {"content": "x"}}]}' + b"\r\n\r\ndata: [DONE]\n\n"
    cut = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    outcome = await outcome_of(SSE_HEAD, *(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in cut), END)
    assert (outcome.failure, outcome.output_tokens) == (None, 1)


@pytest.mark.parametrize(
    ("script", "failure", "detail"),
    [
        ((refusal(429, "full"),), Failure.REFUSED, "429: full"),
        ((refusal(503, "draining"),), Failure.REFUSED, "503: draining"),
        ((refusal(400, "no"),), Failure.BAD_REQUEST, "400: no"),
        ((refusal(500, "oh"),), Failure.SERVER_ERROR, "500: oh"),
        ((b"HTTP/1.1 502 No\r\n\r\n<html>",), Failure.SERVER_ERROR, "502: <html>"),
        ((SSE_HEAD, piece({"error": {"message": "gone"}}), END), Failure.STREAM_ERROR, "{'message': 'gone'}"),
        ((SSE_HEAD, piece(text("a", 1)), END), Failure.BROKEN_STREAM, "the stream ended without [DONE]"),
        ((SSE_HEAD, piece(text("a", 1))), Failure.BROKEN_STREAM, "the body ended before its end"),
        ((SSE_HEAD,), Failure.BROKEN_STREAM, "the body ended before its end"),
        ((b"HTTP/1.1",), Failure.BROKEN_STREAM, "the server closed the connection without an answer"),
        ((SSE_HEAD, piece(b"{}"), END), Failure.BROKEN_STREAM, "not an event of a chat: KeyError('choices')"),
        ((SSE_HEAD, piece(b"[]"), END), Failure.BROKEN_STREAM, "not an event of a chat: "),
        ((SSE_HEAD, piece(b"nonsense"), END), Failure.BROKEN_STREAM, "not an event of a chat: "),
    ],
)
async def test_each_way_to_fail_has_its_name(script: Script, failure: Failure, detail: str) -> None:
    outcome = await outcome_of(*script)
    assert outcome.failure is failure
    assert outcome.detail.startswith(detail)
    assert outcome.timeline() is None


async def test_a_server_that_is_not_there() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        run = await generate(f"http://127.0.0.1:{taken.getsockname()[1]}", "m", ONE)
    assert run.outcomes[0].failure is Failure.NO_CONNECTION


async def test_an_answer_that_does_not_end_is_given_up() -> None:
    outcome = await outcome_of(SSE_HEAD, piece(text("a", 1)), None, timeout_s=0.1)
    assert outcome.failure is Failure.TIMEOUT
    assert outcome.output_tokens == 1


async def test_the_next_request_goes_out_though_no_answer_has_come() -> None:
    server = SseServer(lambda body: (SSE_HEAD, None, piece(text("a", 1), DONE), END))
    traffic = Traffic(tuple(Arrival(0.0, 5, 8) for _ in range(20)), 1.0)
    async with server.running():
        running = asyncio.create_task(generate(server.url, "m", traffic))
        async with asyncio.timeout(20):
            while server.open < 20:
                await asyncio.sleep(0)
        server.release.set()
        run = await running
    assert server.most_open == 20
    assert [each.failure for each in run.outcomes] == [None] * 20


async def test_progress_is_told_to_the_end() -> None:
    told: list[Progress] = []
    scripts = [(refusal(429, "full"),), (SSE_HEAD, piece(text("a", 1), DONE), END)]
    traffic = Traffic((Arrival(0.0, 5, 8), Arrival(0.0, 5, 8)), 1.0)
    async with SseServer(lambda body: scripts.pop()).running() as server:
        await generate(server.url, "m", traffic, tell=told.append)
    assert (told[-1].done, told[-1].open, told[-1].failed) == (2, 0, 1)
