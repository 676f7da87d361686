"""The router against plain round robin: two replicas of the built-in model, a core each, and prompts that begin alike.

    python -m tools.router_bench --repeats 3 --json router.json

Both ways get the same arrivals in each repeat, one after the other and in turns first, against the same two engines,
whose caches are too small for all the beginnings: chats of a few groups, of which the first are the most popular, and
long documents between. Round robin is the client's, so that it pays for no proxy. Then one replica is killed under the
router's load: a request that fails though its client had received nothing yet fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from statistics import fmean

import httpx
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table
from tools.kv_proof.serving import free_port, until_ready
from tools.live.rig import MODEL, NAME, above_zero, one_or_more, parser, refusing, tidelane, write_measurement
from typing_extensions import override

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.targets import parse_slo
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.client import ChatClient
from tidelane.engine.bench.http_stream import Target
from tidelane.engine.bench.load import LoadRun
from tidelane.engine.bench.outcome import Outcome
from tidelane.engine.bench.prompts import Ruler, prompt_of
from tidelane.engine.bench.report import Report, summarise
from tidelane.engine.bench.traffic import Arrival, Kind, Traffic, poisson
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode, Objective, objective_to_wire

# Of a request: past it, it counts as failed.
ANSWERED_WITHIN_S = 300.0
DOCUMENT = "document"
BURST = 8
KILLED_AFTER_S = 0.3
WAYS = ("router", "round robin")


@dataclass(frozen=True, slots=True)
class Grouped(Ruler):
    """Prompts of one kind begin with the `shared_tokens` of their kind; `salt` sets those of one run apart."""

    shared_tokens: int = 0
    salt: str = ""

    @override
    def prompt(self, arrival: Arrival, seed: str) -> str:
        own = prompt_of(self.words(arrival.input_tokens), f"{self.salt}:{seed}")
        if arrival.kind == DOCUMENT:
            return own
        return f"{prompt_of(self.words(self.shared_tokens), f'{self.salt}:{arrival.kind}')} {own}"


@dataclass(frozen=True, slots=True)
class Run:
    """One way through one repeat. Failures are of any kind; `cached` is the share of prompt tokens found cached."""

    attainment: float
    goodput_rps: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    failed: int
    cached: float
    load_average: float


@dataclass(frozen=True, slots=True)
class Kill:
    """One replica was killed: `safe_failures` are of clients that had received nothing yet."""

    requests: int
    completed: int
    broken_streams: int
    safe_failures: int
    retried: float
    load_average: float


def main() -> int:
    args = _parser().parse_args()
    slo = parse_slo(args.slo)
    check_outputs(args.json, None)
    console = Console(width=120)
    runs, kill = run_interruptible(_measured(args, slo, console))
    _show(console, runs, kill, args)
    if args.json is not None:
        ways = {way: [asdict(each) for each in repeats] for way, repeats in runs.items()}
        write_measurement(args.json, {"slo": asdict(slo), "options": _told(args), "ways": ways, "kill": asdict(kill)})
    return 1 if kill.safe_failures else 0


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, slo="ttft=1500ms,ttftPer1k=4s,tpot=300ms")
    add = options.add_argument
    add("--repeats", type=one_or_more, default=3)
    add("--seconds", type=above_zero, default=60.0, help="of traffic in each run (%(default)g)")
    add("--chats", type=above_zero, default=1.2, help="chats a second, of all groups (%(default)g)")
    add("--documents", type=above_zero, default=0.1, help="documents a second (%(default)g)")
    add("--groups", type=one_or_more, default=8, help="of chats that begin alike (%(default)s)")
    add("--shared", type=one_or_more, default=256, help="tokens that a group has in common (%(default)s)")
    add("--kv-tokens", type=one_or_more, default=2048, help="that each replica's cache holds, about (%(default)s)")
    return options


def _told(args: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(args).items() if name not in ("json", "slo")}


def kinds(args: argparse.Namespace) -> list[Kind]:
    """The n-th group has 1/n of the first one's chats."""
    whole = sum(1 / number for number in range(1, args.groups + 1))
    chats = [
        Kind(f"group{number}", args.chats / number / whole, (16, 48), (8, 24)) for number in range(1, args.groups + 1)
    ]
    return [*chats, Kind(DOCUMENT, args.documents, (400, 800), (4, 8))]


async def _measured(args: argparse.Namespace, slo: Slo, console: Console) -> tuple[dict[str, list[Run]], Kill]:
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    cores = sorted(os.sched_getaffinity(0))
    async with (
        _engine(cores[0], slo, args.kv_tokens) as (one, killed),
        _engine(cores[-1], slo, args.kv_tokens) as (two, _),
        _router(one, two) as router,
    ):
        ruler = (await ChatClient(Target.parse(one), NAME, time.monotonic).measured()).ruler
        for repeat in range(args.repeats):
            traffic = poisson(kinds(args), args.seconds, args.seed + repeat)
            for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
                urls = [router] if way == "router" else [one, two]
                grouped = _grouped(ruler, args.shared, f"{way} {args.seed + repeat}")
                before = await _cache(one, two)
                run = await _sent(urls, traffic, grouped)
                after = await _cache(one, two)
                report = summarise(run, traffic.duration_s, slo)
                cached = (after[1] - before[1]) / max(1.0, after[0] - before[0])
                runs[way].append(_run(report, cached))
                console.print(f"{way}, repeat {repeat + 1}: {runs[way][-1]}", highlight=False, soft_wrap=True)
        kill = await _kill(router, killed, args, ruler)
    return runs, kill


async def _kill(router: str, engine: asyncio.subprocess.Process, args: argparse.Namespace, ruler: Ruler) -> Kill:
    """Half as many requests as before, since one replica will have to do; the kill is in the middle, just after several
    have come at once."""
    traffic = poisson(kinds(args), args.seconds, args.seed + args.repeats).faster(0.5)
    middle_s = traffic.duration_s / 2
    burst = [Arrival(middle_s - KILLED_AFTER_S, 32, 16, f"group{1 + number}") for number in range(BURST)]
    traffic = Traffic(tuple(sorted((*traffic.arrivals, *burst), key=lambda each: each.at_s)), traffic.duration_s)
    loop = asyncio.get_running_loop()
    loop.call_later(middle_s, lambda: os.killpg(engine.pid, signal.SIGKILL))
    outcomes = (await _sent([router], traffic, _grouped(ruler, args.shared, "kill"))).outcomes
    failed = [each for each in outcomes if each.failure is not None]
    async with httpx.AsyncClient() as client:
        retried = _sum((await client.get(f"{router}/metrics")).text, "tidelane_router_retries_total")
    return Kill(
        requests=len(outcomes),
        completed=len(outcomes) - len(failed),
        broken_streams=sum(bool(each.token_times_s) for each in failed),
        safe_failures=sum(not each.token_times_s for each in failed),
        retried=retried,
        load_average=os.getloadavg()[0],
    )


def _grouped(ruler: Ruler, shared_tokens: int, salt: str) -> Grouped:
    return Grouped(ruler.template_tokens, ruler.tokens_per_word, shared_tokens, salt)


async def _sent(urls: Sequence[str], traffic: Traffic, ruler: Grouped) -> LoadRun:
    """Each request when it is due, to each of `urls` in turn."""
    start_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - start_s

    clients = [ChatClient(Target.parse(url), NAME, clock, timeout_s=ANSWERED_WITHIN_S, ruler=ruler) for url in urls]
    asking: list[asyncio.Task[Outcome]] = []
    for number, arrival in enumerate(traffic.arrivals):
        await asyncio.sleep(max(0.0, arrival.at_s - clock()))
        # In order of nothing that the traffic has, or groups could fall to one replica by chance.
        client = clients[number % len(clients)]
        asking.append(asyncio.create_task(client.ask(arrival, str(number))))
    return LoadRun(tuple(await asyncio.gather(*asking)), ())


async def _cache(*urls: str) -> tuple[float, float]:
    """Prompt tokens looked up and found, of both replicas."""
    async with httpx.AsyncClient() as client:
        texts = [(await client.get(f"{url}/metrics")).text for url in urls]
    names = ("tidelane_prefix_cache_queries_total", "tidelane_prefix_cache_hits_total")
    queries, hits = (sum(_sum(text, name) for text in texts) for name in names)
    return queries, hits


def _sum(exposition: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in exposition.splitlines() if line.startswith(f"{name}{{"))


def _run(report: Report, cached: float) -> Run:
    total = report.total
    assert total.attainment is not None
    nothing = float("nan")
    return Run(
        attainment=total.attainment.share or 0.0,
        goodput_rps=total.attainment.goodput_rps,
        ttft_p50_s=total.ttft.p50_s if total.ttft else nothing,
        ttft_p90_s=total.ttft.p90_s if total.ttft else nothing,
        tpot_p90_s=total.tpot.p90_s if total.tpot else nothing,
        failed=total.requests - total.completed,
        cached=cached,
        load_average=os.getloadavg()[0],
    )


@asynccontextmanager
async def _engine(core: int, slo: Slo, kv_tokens: int) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A replica on one core, with the leader of its process group."""
    port = free_port()
    objective = json_format.MessageToJson(objective_to_wire(Objective(slo, ExecutionMode.LANES)))
    # Of the built-in model in float32: keys and values of 3 heads of 64 numbers in 30 layers.
    pool_bytes = kv_tokens * 2 * 3 * 64 * 30 * 4
    options = {
        "--model": MODEL, "--served-name": NAME, "--port": port, "--cores": core, "--objective": objective,
        "--kv-pool-memory": pool_bytes, "--max-context-tokens": kv_tokens, "--log-level": "warning",
    }  # fmt: skip
    words = [str(word) for option in options.items() for word in option]
    async with _process(tidelane("serve", *words), f"http://127.0.0.1:{port}") as process:
        yield f"http://127.0.0.1:{port}", process


@asynccontextmanager
async def _router(*urls: str) -> AsyncIterator[str]:
    port = free_port()
    backends = [word for url in urls for word in ("--backend", url)]
    url = f"http://127.0.0.1:{port}"
    async with _process(tidelane("router", "--port", str(port), "--log-level", "warning", *backends), url):
        yield url


@asynccontextmanager
async def _process(command: Sequence[str], url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """In a process group of its own, from ready to its end."""
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
    try:
        await until_ready(url, lambda: process.returncode)
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _show(console: Console, runs: dict[str, list[Run]], kill: Kill, args: argparse.Namespace) -> None:
    table = Table(
        title=f"{args.chats:g} chats of {args.groups} groups and {args.documents:g} documents a second for "
        f"{args.seconds:g} s, {args.slo}; means of {args.repeats} (lowest to highest)",
        title_justify="left",
    )
    table.add_column("way")
    columns: dict[str, Callable[[Run], str | float]] = {
        "within targets, %": lambda run: 100 * run.attainment,
        "TTFT p50, ms": lambda run: 1000 * run.ttft_p50_s,
        "TTFT p90, ms": lambda run: 1000 * run.ttft_p90_s,
        "TPOT p90, ms": lambda run: 1000 * run.tpot_p90_s,
        "cached, %": lambda run: 100 * run.cached,
        "failed": lambda run: run.failed,
        "load average": lambda run: run.load_average,
    }
    for column in columns:
        table.add_column(column, justify="right")
    for way, repeats in runs.items():
        table.add_row(way, *(_spread([float(value(run)) for run in repeats]) for value in columns.values()))
    console.print(table)
    ours, theirs = (fmean(run.attainment for run in runs[way]) for way in WAYS)
    console.print(f"router over round robin, within targets: {ours / theirs if theirs else float('nan'):.2f}")
    console.print(f"one replica killed: {kill}", highlight=False, soft_wrap=True)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.0f} ({min(values):.0f}-{max(values):.0f})"


if __name__ == "__main__":
    sys.exit(refusing(main))
