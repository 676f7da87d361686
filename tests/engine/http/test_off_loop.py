"""What takes long must not keep the event loop, and a client may leave meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.http.asgi import Exchange, SilentLoop, make_service
from engine.http.tiny_model import facts_of
from tidelane.engine.channel import Accepted, Heartbeat, RefusalReason, Refused
from tidelane.engine.http.config import Limits
from tidelane.engine.http.service import Model, Service
from tidelane.engine.http.tokenizer import Tokenizer
from tidelane.engine.slo import Slo

LONG = {"model": "tiny", "prompt": ["a b " * 20, "c d " * 20], "max_tokens": 1}


class HeldWorkers(ThreadPoolExecutor):
    """Threads that begin nothing until told."""

    def __init__(self) -> None:
        self.go = threading.Event()
        super().__init__(max_workers=1, initializer=self.go.wait)


@pytest.fixture
def workers() -> Iterator[HeldWorkers]:
    workers = HeldWorkers()
    yield workers
    workers.go.set()
    workers.shutdown()


def warm_service(folder: Path, loop: SilentLoop, workers: ThreadPoolExecutor, **limits: float) -> Service:
    service = make_service(loop, workers, Limits(inline_chars=100, **limits))  # type: ignore[arg-type]
    facts = facts_of(folder, "tiny")
    service.model = Model(facts, Tokenizer.load(folder, lambda: datetime.now(UTC)))
    return service


async def test_other_requests_are_served_while_a_long_prompt_is_tokenised(
    model_folder: Path, workers: HeldWorkers
) -> None:
    loop = SilentLoop()
    service = warm_service(model_folder, loop, workers)
    long = Exchange(service, "POST", "/v1/completions", LONG)
    health = Exchange(service, "GET", "/health")
    assert await health.answered() == 200
    assert not long.task.done()
    workers.go.set()
    while not loop.submitted:  # its thread hands over in its own time
        await asyncio.sleep(0)
    assert len(loop.submitted) == 2
    long.leave()
    await long.task


async def test_a_chat_of_many_empty_messages_is_rendered_off_the_loop(model_folder: Path, workers: HeldWorkers) -> None:
    loop = SilentLoop()
    service = warm_service(model_folder, loop, workers)
    messages = [{"role": "user", "content": ""}] * 10
    chat = Exchange(service, "POST", "/v1/chat/completions", {"model": "tiny", "messages": messages})
    await Exchange(service, "GET", "/health").answered()
    assert not chat.task.done()
    assert loop.heard == []
    workers.go.set()
    while not loop.submitted:  # its thread hands over in its own time
        await asyncio.sleep(0)
    chat.leave()
    await chat.task


async def test_a_client_that_leaves_while_its_prompt_is_tokenised_never_reaches_the_loop(
    model_folder: Path, workers: HeldWorkers
) -> None:
    loop = SilentLoop()
    service = warm_service(model_folder, loop, workers)
    exchange = Exchange(service, "POST", "/v1/completions", LONG)
    health = Exchange(service, "GET", "/health")
    await health.answered()
    exchange.leave()
    await Exchange(service, "GET", "/health").answered()
    workers.go.set()
    assert await exchange.answered() == 499
    assert loop.heard == []


async def test_a_core_that_dies_while_a_prompt_is_tokenised_is_503(model_folder: Path, workers: HeldWorkers) -> None:
    loop = SilentLoop()
    service = warm_service(model_folder, loop, workers)
    exchange = Exchange(service, "POST", "/v1/completions", LONG)
    await Exchange(service, "GET", "/health").answered()
    service.core_lost = True
    workers.go.set()
    assert await exchange.answered() == 503
    assert loop.heard == []


async def test_before_the_model_is_loaded_requests_are_503(workers: HeldWorkers) -> None:
    service = make_service(SilentLoop(), workers)
    exchange = Exchange(service, "POST", "/v1/completions", LONG)
    assert await exchange.answered() == 503
    assert exchange.headers["retry-after"] == "2"
    assert b'"code":"loading"' in exchange.body
    assert await Exchange(service, "GET", "/ready").answered() == 503
    assert await Exchange(service, "GET", "/health").answered() == 200


async def test_a_body_that_does_not_arrive_is_408(model_folder: Path, workers: HeldWorkers) -> None:
    service = warm_service(model_folder, SilentLoop(), workers, body_timeout_s=0.01)
    exchange = Exchange(service, "POST", "/v1/completions")
    assert await exchange.answered() == 408


async def test_more_open_requests_than_allowed_are_429(model_folder: Path, workers: HeldWorkers) -> None:
    loop = SilentLoop()
    service = warm_service(model_folder, loop, workers, open_calls=1)
    short = {"model": "tiny", "prompt": "a"}
    first = Exchange(service, "POST", "/v1/completions", short)
    while not loop.submitted:
        await asyncio.sleep(0)
    second = Exchange(service, "POST", "/v1/completions", short)
    assert await second.answered() == 429
    assert second.headers["retry-after"] == "1"
    first.leave()
    await first.task
    assert service.open_calls == 0


async def test_a_bug_is_500_in_the_same_shape(model_folder: Path, workers: HeldWorkers) -> None:
    service = warm_service(model_folder, SilentLoop(), workers)

    def broken(bits: int) -> int:
        raise ZeroDivisionError(f"no {bits} bits")

    exchange = Exchange(service, "POST", "/v1/completions", {"model": "tiny", "prompt": "a"}, {"x-request-id": "mine"})
    service.random_bits = broken
    with pytest.raises(ZeroDivisionError):  # on to the server, which logs it
        await exchange.task
    assert exchange.status == 500
    assert json.loads(exchange.body)["error"]["code"] == "internal_error"
    assert exchange.headers["x-request-id"] == "mine"
    assert service.open_calls == 0


def beat(time_s: float, *, steps: int, running: int = 0, waiting: int = 0) -> Heartbeat:
    return Heartbeat(
        time_s=time_s, running=running, waiting=waiting, kv_blocks_total=8, kv_blocks_free=8, kv_blocks_idle=0,
        kv_evictions=0, preemptions=0,
        lane_moves=0, compute_units=1, decode_units=0, prefill_units=0, busy_s={}, steps=steps,
        slo=Slo(ttft_s=1, tpot_s=1), mode="mixed",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("beats", "now_s", "ready"),
    [
        ([], 1.0, False),
        ([beat(1.0, steps=0)], 2.9, True),
        ([beat(1.0, steps=0)], 3.1, False),
        # Idle for long is no reason.
        ([beat(t, steps=5) for t in (1.0, 100.0)], 100.5, True),
        # Work at hand and no step for 30 s is.
        ([beat(1.0, steps=5), beat(100.0, steps=5, running=1), beat(129.0, steps=5, running=1)], 130.0, False),
        ([beat(100.0, steps=5), beat(101.0, steps=5, waiting=1), beat(129.0, steps=5, waiting=1)], 129.5, True),
        ([beat(1.0, steps=5, running=1), beat(100.0, steps=6, running=1)], 101.0, True),
    ],
)
async def test_ready_means_warm_alive_and_making_progress(
    model_folder: Path, workers: HeldWorkers, beats: list[Heartbeat], now_s: float, ready: bool
) -> None:
    loop = SilentLoop(says=list(beats))
    service = warm_service(model_folder, loop, workers)
    service.link.start()
    service.monotonic_s = lambda: now_s
    assert await Exchange(service, "GET", "/ready").answered() == (200 if ready else 503)
    service.link.stop()


async def test_messages_for_requests_that_are_over_are_dropped(model_folder: Path, workers: HeldWorkers) -> None:
    loop = SilentLoop()
    service = warm_service(model_folder, loop, workers)
    exchange = Exchange(service, "POST", "/v1/completions", {"model": "tiny", "prompt": "a"})
    while not loop.submitted:
        await asyncio.sleep(0)
    request_id = loop.submitted[0].request.id
    exchange.leave()
    await exchange.task
    loop.says += [Accepted(request_id), Refused(request_id, RefusalReason.QUEUE_FULL, "late")]
    service.link.start()
    assert loop.says == []
    service.link.stop()
