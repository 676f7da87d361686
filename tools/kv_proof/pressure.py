"""Many clients with long prompts, and room for four sequences: no deadlock, nothing is lost, no block stays."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from tools.kv_proof.serving import Room, TieredEngine
from tools.live.rig import NAME

CLIENTS = 64
# Of the built-in model: 16 tokens in float32. The longest prompt takes some 15 of them with its answer.
BLOCK_BYTES = 737_280
ROOM = Room(device_bytes=4 * 15 * BLOCK_BYTES, host_bytes=36 * BLOCK_BYTES, disk_bytes=256 << 20)
# After the last request was sent, for all to end: far more than it takes to compute all that can wait.
_END_WITHIN_S = 900.0
_TELL_EVERY_S = 5.0


@dataclass(slots=True)
class Ends:
    """How requests have ended: answered, after so long; left by their clients; or as none may."""

    latencies_s: list[float] = field(default_factory=list)
    left: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pressed:
    """Times are from sending a request to the end of its answer, of those that were answered."""

    seconds: float
    sent: int
    answered: int
    left: int
    median_s: float
    p99_s: float
    slowest_s: float
    preemptions: int
    evictions: int
    found_tokens: int
    fetched_blocks: int
    used_blocks: int
    faults: tuple[str, ...]

    @property
    def slowest_over_median(self) -> float:
        return self.slowest_s / self.median_s if self.median_s else 0.0


async def press(
    engine: TieredEngine, seconds: float, seed: int, tell: Callable[[str, int, int], None], clients: int = CLIENTS
) -> Pressed:
    """`engine` is ready, and still runs afterwards."""
    ends = Ends()
    began_s = time.monotonic()
    sent = 0

    async def keep_asking(client: httpx.AsyncClient, chance: random.Random) -> None:
        nonlocal sent
        while time.monotonic() < began_s + seconds:
            sent += 1
            await one_of_many(client, chance, ends)

    async def follow() -> None:
        while True:
            spent_s = round(time.monotonic() - began_s)
            tell(f"{clients} clients", min(spent_s, round(seconds)), round(seconds))
            await asyncio.sleep(_TELL_EVERY_S)

    limits = httpx.Limits(max_connections=clients)
    following = asyncio.create_task(follow())
    faults: list[str] = []
    async with httpx.AsyncClient(base_url=engine.served.url, timeout=None, limits=limits) as client:
        try:
            async with asyncio.timeout(seconds + _END_WITHIN_S):
                await asyncio.gather(
                    *(keep_asking(client, random.Random(f"{seed} {number}")) for number in range(clients))
                )
            await engine.served.until_idle()
        except TimeoutError:
            faults.append(f"some requests had not ended {_END_WITHIN_S:.0f} s after the last was sent")
        finally:
            following.cancel()
    return await _judged(engine, ends, faults, sent, time.monotonic() - began_s)


async def one_of_many(client: httpx.AsyncClient, chance: random.Random, ends: Ends) -> None:
    """A long prompt, some of which begin alike; every third client does not wait for the end."""
    words = " ".join(str(chance.randrange(1000)) for _ in range(chance.randint(15, 40)))
    body = {
        "model": NAME,
        "prompt": f"Of the tide at port {chance.randrange(8)}. " * chance.randint(1, 8) + words,
        "max_tokens": chance.randint(1, 12),
        "stream": True,
        "ignore_eos": True,
    }
    patience_s = chance.uniform(0.01, 20.0) if chance.random() < 1 / 3 else None
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(patience_s), client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
    except TimeoutError:
        ends.left += 1
        return
    errors = [line for line in lines if line.startswith('data: {"error"')]
    if errors or response.status_code != 200 or lines[-1:] != ["data: [DONE]"]:
        ends.wrong.append(f"{response.status_code} {errors or lines[-1:]}")
    else:
        ends.latencies_s.append(time.monotonic() - begun_s)


async def _judged(engine: TieredEngine, ends: Ends, faults: list[str], sent: int, seconds: float) -> Pressed:
    used, preemptions, evictions, found, fetched, failed = await engine.served.metrics(
        f'kv_tier_blocks{{model_name="{NAME}",state="used",tier="device"}}',
        "num_preemptions_total",
        f'kv_evictions_total{{model_name="{NAME}",tier="device"}}',
        "prefix_cache_hits_total",
        f'kv_moved_blocks_total{{model_name="{NAME}",tier="disk",way="load"}}',
        f'request_success_total{{finished_reason="error",model_name="{NAME}"}}',
    )
    answered = len(ends.latencies_s)
    faults += [f"a request ended wrong: {each}" for each in ends.wrong]
    if used:
        faults.append(f"{used:.0f} blocks of the device are held by nobody")
    if failed:
        faults.append(f"{failed:.0f} requests ended with an error, by the engine's own count")
    if sent != answered + ends.left + len(ends.wrong):
        faults.append(f"{sent} requests were sent, and {answered + ends.left + len(ends.wrong)} ends came")
    if not (evictions and answered):
        faults.append(f"no pressure: {answered} requests were answered, and {evictions:.0f} blocks made room")
    in_order = sorted(ends.latencies_s) or [0.0]
    return Pressed(
        seconds=seconds,
        sent=sent,
        answered=answered,
        left=ends.left,
        median_s=statistics.median(in_order),
        p99_s=in_order[-1 - len(in_order) // 100],
        slowest_s=in_order[-1],
        preemptions=int(preemptions),
        evictions=int(evictions),
        found_tokens=int(found),
        fetched_blocks=int(fetched),
        used_blocks=int(used),
        faults=tuple(faults),
    )
