"""Offline work in what interactive work leaves: throughput alone, interactive requests alone, and both together.

    python -m tools.live.colocation --mode Auto --json colocation.json

First the most that this machine does: whole batches for which no target counts (MixedBatch, no tier, targets of an
hour). Then interactive requests at 60 % of that many a second, alone; then beside `flex` work without limit. Wanted:
interactive attainment within a point of what it is alone, and together at least 90 % of the first run's tokens. All by
`tidelane up`; tokens are prompt and answer tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median

from rich.console import Console
from rich.table import Table
from tools.live.rig import (
    NAME,
    above_zero,
    mode,
    one_or_more,
    parser,
    refusing,
    running_service,
    write_measurement,
)

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.targets import parse_slo
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.client import ChatClient
from tidelane.engine.bench.http_stream import Target
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.outcome import Outcome
from tidelane.engine.bench.report import summarise
from tidelane.engine.bench.traffic import Kind, poisson
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode

PROMPT, ANSWER = (20, 200), (20, 60)
ALL_OUT = "throughput alone"
ANY_TIME = Slo(ttft_s=3600.0, tpot_s=3600.0)
# A new engine's first passes are slower: or the run that comes first would pay for it.
WARM_UP_S = 15.0


@dataclass(frozen=True, slots=True)
class Run:
    """`attainment` is that of interactive requests; tokens a second are those that came while requests arrived."""

    what: str
    interactive: int
    attainment: float | None  # None: there were no interactive requests
    tokens_per_s: float
    load_average: float


def main() -> int:
    args = _parser().parse_args()
    slo = parse_slo(args.slo)
    check_outputs(args.json, None)
    console = Console()
    runs: list[Run] = []
    for repeat in range(args.repeats):
        seed = args.seed + repeat
        with running_service(ExecutionMode.MIXED_BATCH, ANY_TIME) as url:
            most = run_interruptible(_run(url, slo, ALL_OUT, args.seconds, 0.0, args.flex, "", seed))
        rate = args.part * most.tokens_per_s / ((sum(PROMPT) + sum(ANSWER)) / 2)
        with running_service(args.mode, slo) as url:
            run_interruptible(_run(url, slo, "warm-up", WARM_UP_S, rate, 0, "flex", seed))
            alone = run_interruptible(_run(url, slo, "interactive alone", args.seconds, rate, 0, "flex", seed))
            both = run_interruptible(_run(url, slo, "both", args.seconds, rate, args.flex, "flex", seed))
        for run in (most, alone, both):
            console.print(f"repeat {repeat + 1}, {rate:.2f}/s: {run}", highlight=False, soft_wrap=True)
            runs.append(run)
    _show(console, runs, args)
    if args.json is not None:
        figures = {"slo": asdict(slo), "mode": args.mode, "runs": [asdict(run) for run in runs]}
        write_measurement(args.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, slo="ttft=1500ms,ttftPer1k=4s,tpot=300ms")
    add = options.add_argument
    add("--mode", type=mode, default=ExecutionMode.AUTO)
    add("--repeats", type=one_or_more, default=3)
    add("--seconds", type=above_zero, default=60.0, help="of each run (%(default)g)")
    add("--part", type=above_zero, default=0.6, help="of capacity, for interactive requests (%(default)g)")
    add("--flex", type=one_or_more, default=24, help="offline requests that are always open (%(default)s)")
    return options


async def _run(
    url: str, slo: Slo, what: str, seconds: float, rate_rps: float, offline_open: int, tier: str, seed: int
) -> Run:
    """`offline_open` requests of `tier` always open, and `rate_rps` interactive ones a second, 0 for none."""
    start_s = time.monotonic()
    offline: list[Outcome] = []
    interactive: Sequence[Outcome] = ()
    attained = None
    numbers = count()

    def clock() -> float:
        return time.monotonic() - start_s

    async def work() -> None:
        """One offline request after another."""
        client = ChatClient(Target.parse(url), NAME, clock)
        arrivals = poisson([Kind("offline", 1000.0, PROMPT, ANSWER, tier=tier)], 1.0, seed).arrivals
        while clock() < seconds:
            number = next(numbers)
            outcome = await client.ask(arrivals[number % len(arrivals)], f"{what}:{seed}:{number}")
            if outcome.failure is not None:
                raise SystemExit(f"an offline request failed: {outcome.failure}: {outcome.detail}")
            offline.append(outcome)

    async with asyncio.TaskGroup() as working:
        for _ in range(offline_open):
            working.create_task(work())
        if rate_rps:
            traffic = poisson([Kind("chat", rate_rps, PROMPT, ANSWER)], seconds, seed)
            # Prompts of its own, or it would find the KV of the run before.
            run = await generate(url, NAME, traffic, seed=zlib.crc32(f"{what} {seed}".encode()))
            interactive = run.outcomes
            total = summarise(run, traffic.duration_s, slo).total
            assert total.attainment is not None
            attained = total.attainment.within_slo / total.requests
    tokens = sum(_tokens_by(seconds, each) for each in (*offline, *interactive))
    return Run(what, len(interactive), attained, tokens / seconds, os.getloadavg()[0])


def _tokens_by(seconds: float, outcome: Outcome) -> int:
    """Of the answer, those that had come by then, and with the first of them the whole prompt."""
    came = sum(each <= seconds for each in outcome.token_times_s)
    return came + (outcome.input_tokens or 0) if came else 0


def _show(console: Console, runs: Sequence[Run], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.mode}, {args.slo}; medians of {args.repeats}", title_justify="left")
    for column in ("", "interactive within targets", "tokens a second"):
        table.add_column(column, justify="right" if column else "left")
    tokens, attained = {}, {}
    for what in ("interactive alone", "both", ALL_OUT):
        of = [run for run in runs if run.what == what]
        tokens[what] = median(run.tokens_per_s for run in of)
        shares = [run.attainment for run in of if run.attainment is not None]
        if shares:
            attained[what] = median(shares)
        table.add_row(what, f"{attained[what]:.1%}" if shares else "", f"{tokens[what]:.0f}")
    console.print(table)
    points = 100 * (attained["both"] - attained["interactive alone"])
    part = tokens["both"] / tokens[ALL_OUT]
    console.print(
        f"Attainment beside flex: {points:+.1f} points. Tokens of both: {part:.0%} of {ALL_OUT}.", highlight=False
    )


if __name__ == "__main__":
    sys.exit(refusing(main))
