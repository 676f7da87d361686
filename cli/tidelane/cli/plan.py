"""`tidelane plan`: in which mode, and on how many GPUs, a service meets its targets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.scenario import (
    Scenario,
    add_scenario_arguments,
    number,
    parse_policies,
    processes,
    scenario,
)
from tidelane.cli.targets import BadOption
from tidelane.engine.bench.meter import Meter
from tidelane.engine.bench.tables import seconds
from tidelane.engine.scheduling.policies import OrderName
from tidelane.engine.sim.contestants import contestants
from tidelane.engine.sim.machine import DoesNotFit
from tidelane.engine.sim.planning import MODES, Sizing, TooManyGpus, best, size_all
from tidelane.engine.sim.workers import WorkerDied

_DESCRIPTION = """Finds, in virtual time, the execution mode and the number of GPUs with which enough of a trace's
requests meet their targets, and how much more traffic those would bear."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plan", help="find the mode and the number of GPUs", description=_DESCRIPTION)
    add_scenario_arguments(parser)
    add = parser.add_argument
    add("--scale", default="1", metavar="X", help="plan for X times the trace's rate (%(default)s)")
    add("--attainment", default="90", metavar="PERCENT", help="of requests that must meet targets (%(default)s)")
    add(
        "--policies",
        default="auto,lanes,chunked",
        metavar="NAMES",
        help="whose modes to weigh, all with our order of prompts (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        told = scenario(args)
        competing = contestants(parse_policies(args.policies), (OrderName.OURS,))
        level = number("--attainment", args.attainment) / 100
        if not 0.01 <= level <= 1:
            raise BadOption(f"--attainment: {args.attainment!r} must be per cent, from 1 to 100")
        demand_rps = told.scene.traffic.rate_rps * number("--scale", args.scale)
        workers = processes(args)
    except (ValueError, OSError, DoesNotFit) as error:
        print(f"tidelane plan: {error}", file=sys.stderr)
        return 2
    try:
        with Meter(Console(stderr=True), "Simulating") as meter:
            sizings = run_interruptible(
                size_all(
                    told.scene,
                    competing,
                    demand_rps=demand_rps,
                    level=level,
                    processes=workers,
                    tell=lambda done: meter.tell(f"Simulating: {done // 10 * 10} runs done", done),
                )
            )
    except KeyboardInterrupt:
        print("tidelane plan: stopped", file=sys.stderr)
        return 130
    except TooManyGpus as error:
        print(f"tidelane plan: --scale: {error}: plan for a part of the traffic", file=sys.stderr)
        return 2
    except WorkerDied as error:
        print(f"tidelane plan: {error}", file=sys.stderr)
        return 1
    modes = [MODES[contestant.policy] for contestant in competing]
    _show(told, demand_rps, level, modes, sizings)
    return 0 if best(sizings) is not None else 1


def _show(
    told: Scenario, demand_rps: float, level: float, modes: Sequence[str], sizings: Sequence[Sizing | None]
) -> None:
    table = Table(
        title=f"{told.trace} at {demand_rps:.3g} requests a second: {told.model} on {told.device}",
        title_justify="left",
    )
    table.add_column("mode", no_wrap=True)
    for name in ("GPUs", "within targets", "margin", "goodput per GPU", "TTFT p99", "TPOT p99"):
        table.add_column(name, justify="right")
    for mode, sizing in zip(modes, sizings, strict=True):
        if sizing is None:
            table.add_row(mode, "none do", *("-",) * 5)
            continue
        figures = sizing.figures
        table.add_row(
            mode,
            str(sizing.gpus),
            f"{figures.attainment:.1%}",
            f"{sizing.margin:+.0%}",
            f"{figures.goodput:.3g}/s",
            seconds(figures.ttft, "p99_s"),
            seconds(figures.tpot, "p99_s"),
        )
    console = Console()
    for note in told.notes:
        console.print(note, markup=False, highlight=False)
    console.print(table)
    chosen = best(sizings)
    if chosen is None:
        console.print(
            f"In no mode do {level:.0%} of the requests meet these targets, however many GPUs: loosen --slo, or lower "
            "--attainment.",
            highlight=False,
        )
    else:
        console.print(
            f"{chosen.mode} on {chosen.gpus} GPU{'s' if chosen.gpus > 1 else ''}: {chosen.figures.attainment:.1%} "
            f"within targets, and {chosen.margin:.0%} more traffic until it is {level:.0%}.",
            highlight=False,
        )
