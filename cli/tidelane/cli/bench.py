"""`tidelane bench`: traffic to any OpenAI-compatible server, and what came of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.numbers import count_from_1, percentile, positive, positive_seconds
from tidelane.cli.targets import EXAMPLE, BadOption, parse_slo
from tidelane.cli.traces import FORMAT_HELP, check_outputs, replayed, without_outputs
from tidelane.engine.bench.exposition import read_metrics
from tidelane.engine.bench.load import LoadRun, generate
from tidelane.engine.bench.meter import LoadMeter
from tidelane.engine.bench.report import Report, summarise
from tidelane.engine.bench.tables import as_json, latency_table, notes
from tidelane.engine.bench.traffic import Kind, Traffic, parse_kind, poisson
from tidelane.engine.sim import report as comparison
from tidelane.engine.sim.page import page
from tidelane.engine.sim.served import result_of
from tidelane.engine.slo import Slo
from tidelane.engine.whole_file import write_whole

_DESCRIPTION = """Sends chat requests when they are due, however the server fares, and reports TTFT, TPOT, token gaps,
and, against targets, attainment and goodput. Targets are those of the server, if it is Tidelane's, unless given. The
files that it writes have the form of those of `tidelane simulate`."""
_DEFAULT_MIX = ("chat:rate=1,in=20-60,out=20-60",)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="send traffic to a service and report", description=_DESCRIPTION)
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="the server, as http://127.0.0.1:8000")
    add("--model", required=True, help="the model's name on the server")
    add(
        "--mix",
        action="append",
        type=_kind,
        metavar="KIND",
        help=f"kind of request (repeatable; {_DEFAULT_MIX[0]})",
    )
    add("--trace", type=Path, metavar="FILE", help="replay a trace instead")
    add("--format", metavar="FORMAT", help=FORMAT_HELP)
    add("--limit", type=count_from_1, metavar="N", help="only the first N requests of the trace")
    add("--speedup", type=positive, default=1.0, metavar="X", help="send X times as densely (%(default)s)")
    add("--duration", type=positive_seconds, metavar="S", help="seconds of traffic (30; of a trace: all of it)")
    add("--seed", type=int, default=0, help="of arrivals, lengths and prompts (%(default)s)")
    add("--slo", metavar="TARGETS", help=f"{EXAMPLE}: as for `tidelane simulate`")
    add(
        "--percentile",
        type=percentile,
        default=99,
        help="share of requests that should be within targets (%(default)s; a server does not tell its own)",
    )
    add("--gpus", type=count_from_1, default=1, metavar="N", help="that serve there: goodput is told for each")
    add("--stop-early", action="store_true", help="let answers end by themselves: for servers without ignore_eos")
    add(
        "--timeout",
        type=positive_seconds,
        default=600.0,
        metavar="S",
        help="give a request up after this long (%(default)s)",
    )
    add("--json", type=Path, metavar="OUT", help="write all figures there")
    add("--html", type=Path, metavar="OUT", help="write a page with charts there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        check_outputs(args.json, args.html, args.trace)
        traffic, changes = _traffic(args)
        slo, run = run_interruptible(_measure(args, traffic))
        report = summarise(run, traffic.duration_s, slo)
        if args.json is not None or args.html is not None:
            _write(args, traffic, run, report, changes)
    except (ValueError, OSError) as error:
        print(f"tidelane bench: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(latency_table(report, f"{args.model} at {args.url}"))
    for line in (*changes, *notes(report)):
        console.print(line, markup=False)
    return 0 if report.total.completed else 1


def _kind(text: str) -> Kind:
    try:
        return parse_kind(text)
    except ValueError as error:
        # argparse swallows the text of a ValueError.
        raise argparse.ArgumentTypeError(str(error)) from error


def _traffic(args: argparse.Namespace) -> tuple[Traffic, tuple[str, ...]]:
    """What to send, and what was done to the trace for it."""
    if args.trace is None:
        for option, value in (("--format", args.format), ("--limit", args.limit)):
            if value is not None:
                raise BadOption(f"{option}: is of a trace: give --trace too")
        kinds = args.mix or [parse_kind(text) for text in _DEFAULT_MIX]
        faster = [replace(kind, rate_rps=kind.rate_rps * args.speedup) for kind in kinds]
        return poisson(faster, args.duration or 30.0, args.seed), ()
    if args.mix:
        raise BadOption("--mix: give either a mix or a --trace")
    traffic, changes = replayed(args.trace, args.format, args.limit, args.seed)
    traffic = traffic.faster(args.speedup)
    return (traffic.first(args.duration) if args.duration else traffic), changes


async def _measure(args: argparse.Namespace, traffic: Traffic) -> tuple[Slo | None, LoadRun]:
    slo = await _targets(args)
    # Progress goes to stderr, so that stdout holds the report alone.
    with LoadMeter(Console(stderr=True), len(traffic.arrivals)) as meter:
        run = await generate(
            args.url,
            args.model,
            traffic,
            seed=args.seed,
            ignore_eos=not args.stop_early,
            timeout_s=args.timeout,
            exact_prompts=True,
            tell=meter.follow,
        )
    return slo, run


async def _targets(args: argparse.Namespace) -> Slo | None:
    """Those given; else the server's own; None if it tells none."""
    if args.slo is not None:
        return parse_slo(args.slo, args.percentile)
    slo = (await read_metrics(args.url)).slo(args.percentile)
    if slo is None and (args.json is not None or args.html is not None):
        raise BadOption("--slo: is missing, and the server tells no targets of its own")
    return slo


def _write(args: argparse.Namespace, traffic: Traffic, run: LoadRun, report: Report, changes: tuple[str, ...]) -> None:
    assert report.slo is not None
    result = result_of("served", run, traffic.rate_rps, args.gpus, report.slo)
    header = comparison.Header(
        trace=args.trace.name if args.trace is not None else "a mix of requests",
        requests=len(traffic.arrivals),
        model=args.model,
        gpu=args.url,
        gpus=args.gpus,
        slo=report.slo,
        seed=args.seed,
        versions={"tidelane": importlib.metadata.version("tidelane"), "python": platform.python_version()},
        command=shlex.join(["tidelane", *without_outputs(args.words)]),
        notes=(*changes, *notes(report)),
    )
    if args.json is not None:
        whole = comparison.as_json(header, [result]) | {"report": as_json(report)}
        write_whole(args.json, json.dumps(whole, indent=1) + "\n")
    if args.html is not None:
        write_whole(args.html, page(header, [result]))
