"""What HTTP costs the decode step: the real server streaming to 64 clients, against the loop alone.

Clients need processor time that is theirs, not the server's. So the figure that counts is taken with the engine on
cores of its own and the front with all clients on another; beside it stands the one with everything on all cores, as on
a small machine with its clients on it. Where tokens are seen differs (at the clients, at the loop), but a step's mean
over many steps does not depend on that.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tidelane.engine.bench.engine_cases import request
from tidelane.engine.bench.http_stream import Target, exchange
from tidelane.engine.bench.in_process import LOOSE_SLO, InProcessEngine
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.outcome import Outcome
from tidelane.engine.bench.ratio import Measured, Ratio, interleaved
from tidelane.engine.bench.steady import steady_step_s
from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.config import ServeConfig
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.serve import serve
from tidelane.rpc.wire import ExecutionMode, Objective

STREAMS = 64
PROMPT_TOKENS = 16
NEW_TOKENS = 24
# All prompts in one pass, so that all streams decode together nearly from the start.
_MODE = ExecutionMode.MIXED_BATCH
_NAME = "bench"
_READY_S = 120.0


def http_cost(loaded: LoadedModel, cores: Sequence[int], rounds: int) -> list[Ratio]:
    ratios = []
    if len(cores) > 1:
        ratios.append(_cost(loaded, cores[:-1], cores[-1:], rounds, "front and clients on a core of their own"))
    ratios.append(_cost(loaded, cores, cores, rounds, "front and clients on the engine's cores"))
    return ratios


def _cost(
    loaded: LoadedModel, engine_cores: Sequence[int], other_cores: Sequence[int], rounds: int, where: str
) -> Ratio:
    with _server(loaded.facts.folder, engine_cores, other_cores) as url, _this_thread_on(other_cores):
        outcomes = _ask(url)  # the first time is slower; and it tells how long the prompts are to the model
        prompt_tokens = outcomes[0].input_tokens or PROMPT_TOKENS
        with InProcessEngine(loaded, cores=engine_cores, mode=_MODE) as engine:
            over, under = interleaved(
                lambda: 1000 * steady_step_s([each.token_times_s for each in _ask(url)]),
                lambda: 1000 * _step_alone_s(engine, prompt_tokens),
                rounds,
            )
    return Ratio(
        f"decode step with {STREAMS} open HTTP streams over none, {where}",
        Measured("HTTP", over, "ms"),
        Measured("none", under, "ms"),
        at_most=1.1,
    )


def _ask(url: str) -> Sequence[Outcome]:
    traffic = Traffic(tuple(Arrival(0.0, PROMPT_TOKENS, NEW_TOKENS) for _ in range(STREAMS)), 1.0)
    outcomes = asyncio.run(generate(url, _NAME, traffic)).outcomes
    failed = [each for each in outcomes if each.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {STREAMS} streams failed; the first: {failed[0].detail}")
    return outcomes


def _step_alone_s(engine: InProcessEngine, prompt_tokens: int) -> float:
    engine.desk.sent.clear()
    for number in range(STREAMS):
        engine.submit(request(f"alone{number}", prompt_tokens, NEW_TOKENS))
    engine.run()
    return steady_step_s(list(engine.token_times().values()))


@contextmanager
def _server(folder: Path, engine_cores: Sequence[int], front_cores: Sequence[int]) -> Iterator[str]:
    """The server as it is in production, two processes; its front moved to `front_cores`. Gives its address."""
    port = _free_port()
    config = ServeConfig(
        model=f"file://{folder}",
        model_store=folder.parent,
        served_name=_NAME,
        objective=Objective(LOOSE_SLO, _MODE),
        port=port,
        cores=tuple(engine_cores),
        log_level="warning",
    )
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config,))
    process.start()
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_ready(url, process))
        for front in psutil.Process(process.pid).children():
            _move(front, front_cores)
        yield url
    finally:
        process.terminate()
        process.join()


async def _ready(url: str, process: multiprocessing.process.BaseProcess) -> None:
    give_up_s = time.monotonic() + _READY_S
    while time.monotonic() < give_up_s and process.is_alive():
        try:
            async with exchange(Target.parse(url), "GET", "/ready") as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass  # not listening yet
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {_READY_S:g} s")


def _move(process: psutil.Process, cores: Sequence[int]) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


@contextmanager
def _this_thread_on(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
