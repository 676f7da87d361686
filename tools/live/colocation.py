"""Offline work in what interactive work leaves: interactive requests alone, `flex` alone, and both together.

    python -m tools.live.colocation --mode Auto --json colocation.json

First `flex` alone, as much as fits: the most that this machine does. Then interactive requests at 60 % of that many a
second, alone; then both. Wanted: interactive attainment within a point of what it is alone, and together at least 90 %
of the tokens that throughput-only work gets done. All by `tidelane up`; tokens are prompt and answer tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tools.live.up import NAME, manifest, serving

from tidelane.cli.targets import parse_slo
from tidelane.engine.bench.client import ChatClient
from tidelane.engine.bench.http_stream import Target
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.outcome import Outcome
from tidelane.engine.bench.report import summarise
from tidelane.engine.bench.traffic import Kind, poisson
from tidelane.engine.slo import Slo

PROMPT, ANSWER = (20, 200), (20, 60)


@dataclass(frozen=True, slots=True)
class Run:
    """`attainment` is that of interactive requests; tokens a second are of all that ended while requests arrived."""

    what: str
    interactive: int
    attainment: float
    tokens_per_s: float
    load_average: float


def main() -> int:
    args = _parser().parse_args()
    slo = parse_slo(args.slo)
    console = Console()
    runs: list[Run] = []
    for repeat in range(args.repeats):
        with serving(manifest(args.mode, slo)) as url:
            most = asyncio.run(_run(url, slo, "flex alone", 0.0, args, repeat))
            rate = args.part * most.tokens_per_s / ((sum(PROMPT) + sum(ANSWER)) / 2)
            for what, flex in (("interactive alone", 0), ("both", args.flex)):
                args_here = argparse.Namespace(**{**vars(args), "flex": flex})
                runs.append(asyncio.run(_run(url, slo, what, rate, args_here, repeat)))
                console.print(f"{rate:.2f}/s: {runs[-1]}", highlight=False, soft_wrap=True)
        runs.append(most)
    _show(console, runs, args)
    if args.json is not None:
        document = {"slo": asdict(slo), "mode": args.mode, "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", default="Auto")
    add("--repeats", type=int, default=3)
    add("--seconds", type=float, default=60.0, help="of each run (%(default)g)")
    add("--part", type=float, default=0.6, help="of capacity, for interactive requests (%(default)g)")
    add("--flex", type=int, default=24, help="offline requests that are always open (%(default)s)")
    add("--slo", default="ttft=1500ms,ttftPer1k=4s,tpot=200ms", help="targets for this machine (%(default)s)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write all figures there")
    return parser


async def _run(url: str, slo: Slo, what: str, rate_rps: float, args: argparse.Namespace, repeat: int) -> Run:
    start_s = time.monotonic()
    offline: list[Outcome] = []
    numbers = count()

    async def work() -> None:
        """One offline request after another."""
        client = ChatClient(Target.parse(url), NAME, lambda: time.monotonic() - start_s)
        traffic = poisson([Kind("flex", 1000.0, PROMPT, ANSWER, tier="flex")], 1.0, args.seed + repeat)
        while True:
            number = next(numbers)
            arrival = traffic.arrivals[number % len(traffic.arrivals)]
            offline.append(await client.ask(arrival, f"{what}:{repeat}:{number}"))

    workers = [asyncio.create_task(work()) for _ in range(args.flex)]
    try:
        interactive: Sequence[Outcome] = ()
        attained = float("nan")
        if rate_rps:
            traffic = poisson([Kind("chat", rate_rps, PROMPT, ANSWER)], args.seconds, args.seed + repeat)
            run = await generate(url, NAME, traffic)
            interactive = run.outcomes
            report = summarise(run, traffic.duration_s, slo)
            assert report.total.attainment is not None
            attained = report.total.attainment.within_slo / report.total.requests
        else:
            await asyncio.sleep(args.seconds)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    ended = [each for each in (*offline, *interactive) if each.failure is None and each.ended_s <= args.seconds]
    tokens = sum((each.input_tokens or 0) + each.output_tokens for each in ended)
    return Run(what, len(interactive), attained, tokens / args.seconds, os.getloadavg()[0])


def _show(console: Console, runs: Sequence[Run], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.mode}, {args.slo}; medians of {args.repeats}", title_justify="left")
    for column in ("", "interactive within targets", "tokens a second"):
        table.add_column(column, justify="right" if column else "left")
    found: dict[str, tuple[float, float]] = {}
    for what in ("interactive alone", "both", "flex alone"):
        of = [run for run in runs if run.what == what]
        found[what] = (median(run.attainment for run in of), median(run.tokens_per_s for run in of))
        table.add_row(what, f"{found[what][0]:.1%}", f"{found[what][1]:.0f}")
    console.print(table)
    points = 100 * (found["both"][0] - found["interactive alone"][0])
    part = found["both"][1] / found["flex alone"][1]
    console.print(
        f"Attainment beside flex: {points:+.1f} points. Tokens of both: {part:.0%} of flex alone.", highlight=False
    )


if __name__ == "__main__":
    sys.exit(main())
