"""The router before real fronts: what it makes of what they really say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from engine.http.fake_loop import Script
from engine.http.front_process import SERVED_NAME, FrontProcess
from engine.http.sse import DONE, parse, text
from engine.http.tiny_model import facts_of, write_model_folder
from router.conftest import RunningRouter, StartRouter
from tidelane.engine.channel import RefusalReason, Refused

PATH = "/v1/completions"
BODY = {"model": SERVED_NAME, "prompt": "The capital of France is Paris. " * 9, "max_tokens": 3, "temperature": 0}
Pair = tuple[FrontProcess, FrontProcess]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tiny-model")
    write_model_folder(folder)
    facts = facts_of(folder, SERVED_NAME)
    first, second = (FrontProcess(tmp_path_factory.mktemp("front"), facts) for _ in range(2))
    try:
        first.wait_until_ready()
        second.wait_until_ready()
        yield first, second
    finally:
        first.stop()
        second.stop()


@pytest.fixture
async def router(pair: Pair, start_router: StartRouter) -> RunningRouter:
    return await start_router(*(front.url for front in pair))


async def submissions(front: FrontProcess, count: int) -> None:
    await asyncio.to_thread(front.loop.wait_for_submissions, count)


async def test_answers_are_the_fronts_own(pair: Pair, router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=pair[0].url, verify=False) as direct:
        wholes = [(await http.post(PATH, json=BODY)).json() for http in (direct, router.http)]
        streams = [(await http.post(PATH, json=BODY | {"stream": True})).text for http in (direct, router.http)]
        errors = [await http.post(PATH, json=BODY | {"temperature": 9}) for http in (direct, router.http)]
        cards = [(await http.get("/v1/models")).json()["data"][0] for http in (direct, router.http)]
    assert wholes[0]["choices"] == wholes[1]["choices"]
    assert wholes[0]["usage"] == wholes[1]["usage"]
    theirs, ours = (list(parse(stream.split("\n"))) for stream in streams)
    assert text(ours) == text(theirs) == wholes[0]["choices"][0]["text"]
    assert ours[-1] == DONE
    assert [each.status_code for each in errors] == [400, 400]
    assert errors[0].json() == errors[1].json()
    assert {**cards[0], "created": 0} == {**cards[1], "created": 0}
    await router.poll()  # on a slow machine what was heard at first is stale by now
    assert await router.metric("backend_up") == 2


async def test_a_front_whose_queue_is_full_is_passed_over(pair: Pair, router: RunningRouter) -> None:
    for front in pair:
        front.loop.reset()
    await router.http.post(PATH, json=BODY)
    holder, other = pair if pair[0].loop.submitted else pair[::-1]
    holder.loop.answer(Script(refusal=Refused("", RefusalReason.QUEUE_FULL, "full", retry_after_s=3.0)))
    assert (await router.http.post(PATH, json=BODY)).status_code == 200
    assert len(other.loop.submitted) == 1
    for front in pair:
        front.loop.answer(Script(refusal=Refused("", RefusalReason.QUEUE_FULL, "full", retry_after_s=3.0)))
    refused = await router.http.post(PATH, json=BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert refused.json()["error"]["code"] == "queue_full"


# The last: one front ends here.
async def test_of_a_front_that_dies_what_has_begun_ends_with_its_word_and_what_has_not_is_answered_elsewhere(
    pair: Pair, router: RunningRouter
) -> None:
    for front in pair:
        front.loop.reset()
    await router.http.post(PATH, json=BODY)
    holder, other = pair if pair[0].loop.submitted else pair[::-1]
    holder.loop.hold()

    async def stream() -> list[str]:
        async with router.http.stream("POST", PATH, json=BODY | {"stream": True}) as response:
            assert response.status_code == 200
            return [line async for line in response.aiter_lines()]

    begun = asyncio.create_task(stream())
    await submissions(holder, 2)
    await asyncio.to_thread(holder.loop.step)
    async with asyncio.timeout(20):
        while not await router.metric("ttft_seconds_count"):
            pass
    waiting = asyncio.create_task(stream())
    whole = asyncio.create_task(router.http.post(PATH, json=BODY))
    await submissions(holder, 4)
    await asyncio.to_thread(holder.kill_core)

    *_, last = parse(await begun)
    assert last["error"]["code"] == "engine_stopped"
    *_, last = parse(await waiting)
    assert last == DONE
    assert (await whole).json()["usage"]["completion_tokens"] == 3
    assert len(other.loop.submitted) == 2
    assert (
        await router.metric("retries_total", reason="broken_off")
        + await router.metric("retries_total", reason="closed")
        == 2
    )
