"""Goodput on this machine, mode by mode: the built-in model by `tidelane up`, short chats beside long prompts.

    python -m tools.live.goodput --repeats 3 --json goodput.json

Each mode gets a service of its own with the agent's slow loop beside it, and the same traffic; modes take turns, so
that a machine that slows down slows all of them. Prints the mean of the repeats and their spread, and how `Lanes`
does against the better of the baselines. ChunkedPrefill tunes its chunk to the TPOT target in each pass.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table
from tools.live.rig import (
    COMPARED,
    NAME,
    above_zero,
    chats_and_documents,
    modes,
    one_or_more,
    parser,
    refusing,
    running_service,
    write_measurement,
)

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.targets import parse_slo
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.report import Report, summarise
from tidelane.engine.bench.traffic import Traffic, poisson
from tidelane.engine.slo import Slo

BASELINES = ("MixedBatch", "ChunkedPrefill")


@dataclass(frozen=True, slots=True)
class Served:
    """One run. `goodput_rps`: requests within their targets over the seconds in which requests arrived."""

    attainment: float
    goodput_rps: float
    ttft_p90_s: float
    tpot_p90_s: float
    gap_p99_s: float
    load_average: float


def main() -> int:
    args = _parser().parse_args()
    slo = parse_slo(args.slo)
    check_outputs(args.json, None)
    kinds = chats_and_documents(args.chats, args.documents)
    console = Console()
    runs: dict[str, list[Served]] = {mode: [] for mode in args.modes}
    for repeat in range(args.repeats):
        traffic = poisson(kinds, args.seconds, args.seed + repeat)
        for mode in args.modes:
            with running_service(mode, slo) as url:
                report = run_interruptible(_measured(url, traffic, slo))
            served = _served(report)
            runs[mode].append(served)
            console.print(f"{mode}, repeat {repeat + 1}: {served}", highlight=False, soft_wrap=True)
    _show(console, runs, args)
    if args.json is not None:
        figures = {
            "slo": asdict(slo),
            "kinds": [asdict(kind) for kind in kinds],
            "seconds": args.seconds,
            "modes": {mode: [asdict(each) for each in repeats] for mode, repeats in runs.items()},
        }
        write_measurement(args.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, slo="ttft=1s,ttftPer1k=8s,tpot=100ms")
    add = options.add_argument
    add("--modes", type=modes, default=COMPARED)
    add("--repeats", type=one_or_more, default=3)
    add("--seconds", type=above_zero, default=90.0, help="of traffic in each run (%(default)g)")
    add("--chats", type=above_zero, default=0.4, help="short requests a second (%(default)g)")
    add("--documents", type=above_zero, default=0.12, help="long requests a second (%(default)g)")
    return options


async def _measured(url: str, traffic: Traffic, slo: Slo) -> Report:
    run = await generate(url, NAME, traffic, exact_prompts=True)
    return summarise(run, traffic.duration_s, slo)


def _served(report: Report) -> Served:
    total = report.total
    assert total.attainment is not None
    attained = total.attainment.within_slo / total.requests
    return Served(
        attained,
        attained * total.requests / report.duration_s,
        total.ttft.p90_s if total.ttft else float("nan"),
        total.tpot.p90_s if total.tpot else float("nan"),
        total.gap.p99_s if total.gap else float("nan"),
        os.getloadavg()[0],
    )


def _show(console: Console, runs: dict[str, list[Served]], args: argparse.Namespace) -> None:
    table = Table(
        title=f"{args.chats:g} chats and {args.documents:g} documents a second for {args.seconds:g} s, {args.slo}; "
        f"means of {args.repeats} (lowest to highest)",
        title_justify="left",
    )
    table.add_column("mode")
    for column in ("goodput", "within targets", "TTFT p90", "TPOT p90", "token gap p99"):
        table.add_column(column, justify="right")
    for mode, served in runs.items():
        goodput, attained = [each.goodput_rps for each in served], [100 * each.attainment for each in served]
        latencies = (
            f"{1000 * fmean(getattr(each, name) for each in served):.0f} ms"
            for name in ("ttft_p90_s", "tpot_p90_s", "gap_p99_s")
        )
        table.add_row(mode, f"{_spread(goodput, '.3f')}/s", f"{_spread(attained, '.0f')} %", *latencies)
    console.print(table)
    # Means: each repeat has traffic of its own.
    baselines = {mode: fmean(each.goodput_rps for each in runs[mode]) for mode in BASELINES if mode in runs}
    if baselines and "Lanes" in runs:
        better = max(baselines, key=lambda mode: baselines[mode])
        ratio = fmean(each.goodput_rps for each in runs["Lanes"]) / baselines[better]
        console.print(f"Lanes over {better}, the better baseline: {ratio:.2f}", highlight=False)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(refusing(main))
