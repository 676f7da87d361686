"""`tidelane simulate`: any policies on any GPU, in virtual time, against the same traffic."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.scenario import (
    Scenario,
    add_scenario_arguments,
    machine,
    number,
    parse_orders,
    parse_policies,
    processes,
    scenario,
    whole_number,
)
from tidelane.cli.targets import BadOption
from tidelane.cli.traces import check_outputs, without_outputs
from tidelane.engine.bench.meter import Meter
from tidelane.engine.bench.tables import duration
from tidelane.engine.scheduling.policies import OrderName
from tidelane.engine.sim.contestants import POLICIES, contestants
from tidelane.engine.sim.machine import DoesNotFit
from tidelane.engine.sim.page import page
from tidelane.engine.sim.report import Header, as_json, attainment_table, goodput_table, latency_table, telling_point
from tidelane.engine.sim.sweep import GRID, Effort, Result, sweep
from tidelane.engine.sim.workers import WorkerDied
from tidelane.engine.slo import Timeline, percentile
from tidelane.engine.whole_file import write_whole

_DESCRIPTION = """Replays a trace in virtual time under one scheduling policy after another, with the code that serves
live, and reports how many requests meet their targets. Rates and goodput are requests a second for each GPU;
disaggregated counts the GPUs of both phases. With --sweep it runs six rates and finds the highest at which 90 % and
99 % of the requests meet theirs."""
_EPILOG = """The chunk size of chunked and the border of static are tuned for each rate, on the first --tune requests.
With --measured DIR it replays a measured run of vLLM instead: it fits the prior to its first third and reports how
near the whole comes; give --model and --gpu with it."""
_NOT_WITH_MEASURED = (
    *("trace", "sketch", "format", "limit", "slo", "sweep", "rates", "rate", "html"),
    *("kv_host_memory", "kv_disk_memory", "kv_host_rate", "kv_disk_rate", "kv_prefetch"),
)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate", help="compare policies in virtual time", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_scenario_arguments(parser)
    add = parser.add_argument
    add("--gpus", default="1", metavar="N", help="GPUs that share the traffic (%(default)s)")
    add("--policies", default=",".join(POLICIES), metavar="NAMES", help="which to compare (%(default)s)")
    add(
        "--order",
        default="own,ours",
        metavar="ORDERS",
        help="of prompts: own is first come, ours is by deadlines (%(default)s)",
    )
    add(
        "--late",
        choices=("serve", "refuse"),
        default="serve",
        help="what becomes of requests that would be late: with refuse, ours refuses them as they come (%(default)s)",
    )
    add("--sweep", action="store_true", help="try several rates, and find the highest that can be sustained")
    add("--rates", metavar="A,B,C", help="of the sweep (six, up to twice what a GPU can work off)")
    add("--rate", metavar="RPS", help="without --sweep: the only one (the trace's own)")
    add("--tune", default="600", metavar="N", help="requests for each setting of a policy to tune (%(default)s)")
    add("--refine", default="2", metavar="N", help="runs to find each rate that can be sustained (%(default)s)")
    add("--measured", type=Path, metavar="DIR", help="a measured run of vLLM, instead of a trace")
    add("--json", type=Path, metavar="OUT", help="write all figures there")
    add("--html", type=Path, metavar="OUT", help="write a page with charts there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        check_outputs(args.json, args.html, args.trace or args.sketch)
        if args.measured is not None:
            return _against_measured(args)
        told = scenario(args)
        told = replace(told, scene=replace(told.scene, refuse_late=args.late == "refuse"))
        orders = parse_orders(args.order)
        if told.scene.refuse_late and OrderName.OURS not in orders:
            raise BadOption("--late: it is ours that refuses: add it to --order, or leave --late out")
        competing = contestants(parse_policies(args.policies), orders)
        effort = _effort(args, told)
        workers = processes(args)
    except (ValueError, OSError, DoesNotFit) as error:
        print(f"tidelane simulate: {error}", file=sys.stderr)
        return 2
    try:
        with Meter(Console(stderr=True), "Simulating") as meter:
            results = run_interruptible(
                sweep(
                    told.scene,
                    competing,
                    effort,
                    processes=workers,
                    # In tenths, so that without a terminal it stays at ten lines.
                    tell=lambda done, of: meter.tell(f"Simulating: {10 * (10 * done // of)} % of {of} runs", done, of),
                )
            )
    except KeyboardInterrupt:
        print("tidelane simulate: stopped; nothing was written", file=sys.stderr)
        return 130
    except WorkerDied as error:
        print(f"tidelane simulate: {error}", file=sys.stderr)
        return 1
    header = _header(args, told, effort)
    _show(header, results)
    try:
        if args.json is not None:
            write_whole(args.json, json.dumps(as_json(header, results), indent=1) + "\n")
        if args.html is not None:
            write_whole(args.html, page(header, results))
    except OSError as error:
        print(f"tidelane simulate: the figures above could not be written: {error}", file=sys.stderr)
        return 1
    return 0


def _effort(args: argparse.Namespace, told: Scenario) -> Effort:
    gpus = whole_number("--gpus", args.gpus, at_least=1)
    tune = whole_number("--tune", args.tune, at_least=1)
    refine = whole_number("--refine", args.refine)
    if not args.sweep:
        if args.rates is not None:
            raise BadOption("--rates: needs --sweep; for a single rate give --rate")
        own = told.scene.traffic.rate_rps / gpus
        return Effort((own if args.rate is None else number("--rate", args.rate),), tune, 0, gpus)
    if args.rate is not None:
        raise BadOption("--rate: is for one rate alone: leave out --sweep, or give --rates")
    if args.rates is not None:
        rates = tuple(dict.fromkeys(number("--rates", text) for text in args.rates.split(",")))
    else:
        saturation = told.scene.saturation(tune)
        rates = tuple(float(f"{saturation * part:.3g}") for part in GRID)
    return Effort(rates, tune, refine, gpus)


def _header(args: argparse.Namespace, told: Scenario, effort: Effort) -> Header:
    return Header(
        trace=told.trace,
        requests=len(told.scene.traffic.arrivals),
        model=told.model,
        gpu=told.device,
        gpus=effort.gpus,
        slo=told.scene.slo,
        seed=told.scene.seed,
        versions={"tidelane": importlib.metadata.version("tidelane"), "python": platform.python_version()},
        command=shlex.join(["tidelane", *without_outputs(args.words)]),
        notes=(
            *told.notes,
            "Rates and goodput are requests a second for each GPU; disaggregated counts those of both phases.",
            f"Chunk sizes and static splits are tuned for each rate, on its first {effort.tuning_requests} requests.",
        ),
    )


def _show(header: Header, results: Sequence[Result]) -> None:
    console = Console()
    for note in header.notes:
        console.print(note, markup=False, highlight=False)
    console.print(latency_table(results, telling_point(results)))
    console.print(attainment_table(header, results))
    console.print(goodput_table(results))


def _against_measured(args: argparse.Namespace) -> int:
    from tidelane.engine.sim.measured import corrected, fitted, read_run, simulated

    unused = [f"--{name.replace('_', '-')}" for name in _NOT_WITH_MEASURED if getattr(args, name)]
    if unused:
        raise BadOption(f"--measured: brings its own requests and policy: leave out {', '.join(unused)}")
    measured = read_run(args.measured)
    with Meter(Console(stderr=True), f"Fitting to the first third of {len(measured.timelines)} requests"):
        one = machine(args)
        costs = fitted(measured, one)
        timelines = simulated(measured, corrected(one, costs))
    table = Table(title=f"{measured.name}: {measured.model}", title_justify="left")
    for column in ("", "measured", "simulated", "error"):
        table.add_column(column, justify="left" if not column else "right")
    figures = _figures(measured.timelines), _figures(timelines)
    for name, real_s in figures[0].items():
        virtual_s = figures[1][name]
        table.add_row(name, duration(real_s), duration(virtual_s), f"{virtual_s / real_s - 1:+.1%}")
    if args.json is not None:
        rows = {name: {"measured_s": figures[0][name], "simulated_s": figures[1][name]} for name in figures[0]}
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")
    console = Console()
    console.print(
        f"Fitted: {costs.linear:.2f} times the prior's weights and arithmetic, {costs.context:.2f} times its reading "
        f"of KV, and {1e6 * costs.pass_s:.0f} µs for each pass.",
        highlight=False,
    )
    console.print(table)
    return 0


def _figures(timelines: Sequence[Timeline]) -> dict[str, float]:
    ttft_s = [each.ttft_s for each in timelines]
    tpot_s = [each.tpot_s for each in timelines if each.output_tokens > 1]
    return {
        f"{name} p{percent}": percentile(values, percent)
        for name, values in (("TTFT", ttft_s), ("TPOT", tpot_s))
        for percent in (50, 90, 99)
    }
