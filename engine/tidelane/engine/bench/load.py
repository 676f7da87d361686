"""Open-loop load: each request goes out when it is due, however the server fares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tidelane.engine.bench.client import ChatClient
from tidelane.engine.bench.http_stream import Target
from tidelane.engine.bench.outcome import Outcome
from tidelane.engine.bench.traffic import Traffic

# How often the generator looks whether its own event loop is late.
_PULSE_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadRun:
    """`loop_lag_s` are samples of how late the generator's own loop was to wake: part of it is in every time stamp."""

    outcomes: tuple[Outcome, ...]
    loop_lag_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """`open` counts requests that are on their way."""

    elapsed_s: float
    done: int
    open: int
    failed: int


async def generate(
    url: str,
    model: str,
    traffic: Traffic,
    *,
    seed: int = 0,
    ignore_eos: bool = True,
    timeout_s: float = 600.0,
    exact_prompts: bool = False,
    tell: Callable[[Progress], None] | None = None,
) -> LoadRun:
    """Send `traffic` to the chat route of the server at `url`, and wait for the last answer.

    With `exact_prompts` two short requests come first, to measure prompts by.
    """
    start_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - start_s

    client = ChatClient(Target.parse(url), model, clock, ignore_eos, timeout_s)
    if exact_prompts:
        client = await client.measured()
        start_s = time.monotonic()
    lag_s: list[float] = []
    outcomes: list[Outcome] = []
    due = len(traffic.arrivals)
    sent = 0

    def report() -> None:
        if tell is not None:
            failed = sum(each.failure is not None for each in outcomes)
            tell(Progress(clock(), len(outcomes), sent - len(outcomes), failed))

    async def ask(number: int) -> None:
        outcomes.append(await client.ask(traffic.arrivals[number], f"{seed}:{number}"))

    pulse = asyncio.create_task(_pulse(clock, lag_s, report))
    try:
        async with asyncio.TaskGroup() as asking:
            for number in range(due):
                await asyncio.sleep(max(0.0, traffic.arrivals[number].at_s - clock()))
                sent += 1
                asking.create_task(ask(number))
    finally:
        pulse.cancel()
    report()
    return LoadRun(tuple(sorted(outcomes, key=lambda each: each.arrival.at_s)), tuple(lag_s))


async def _pulse(clock: Callable[[], float], lag_s: list[float], report: Callable[[], None]) -> None:
    while True:
        due_s = clock() + _PULSE_S
        await asyncio.sleep(_PULSE_S)
        lag_s.append(max(0.0, clock() - due_s))
        report()
