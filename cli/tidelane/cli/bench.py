"""`tidelane bench`: traffic to any OpenAI-compatible server, and what came of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tidelane.cli.numbers import not_negative, percentile, positive, positive_seconds
from tidelane.engine.bench.exposition import read_metrics
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.meter import LoadMeter
from tidelane.engine.bench.report import Report, summarise
from tidelane.engine.bench.tables import as_json, latency_table, notes
from tidelane.engine.bench.traces import BadTrace, read_trace
from tidelane.engine.bench.traffic import Kind, Traffic, parse_kind, poisson
from tidelane.engine.slo import Slo

_DESCRIPTION = """Sends chat requests when they are due, however the server fares, and reports TTFT, TPOT, token gaps,
and, against targets, attainment and goodput. Targets are those of the server, if it is Tidelane's, unless given."""
_DEFAULT_MIX = ("chat:rate=1,in=20-60,out=20-60",)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="send traffic to a service and report", description=_DESCRIPTION)
    add = parser.add_argument
    add("url", metavar="URL", help="the server, as http://127.0.0.1:8000")
    add("--model", required=True, help="the model's name on the server")
    add(
        "--mix",
        action="append",
        type=_kind,
        metavar="KIND",
        help=f"kind of request, as {_DEFAULT_MIX[0]} (repeatable)",
    )
    add("--trace", type=Path, metavar="FILE", help="replay a trace instead: Azure's .csv or Mooncake's .jsonl")
    add("--speed", type=positive, default=1.0, metavar="X", help="send X times as densely (%(default)s)")
    add("--duration", type=positive_seconds, metavar="S", help="seconds of traffic (30; of a trace: all of it)")
    add("--seed", type=int, default=0, help="of arrivals, lengths and prompts (%(default)s)")
    add("--ttft-ms", type=positive, metavar="MS", help="target: time to first token")
    add("--ttft-per-1k-ms", type=not_negative, metavar="MS", help="target: allowance for each 1,000 prompt tokens")
    add("--tpot-ms", type=positive, metavar="MS", help="target: time per output token")
    add(
        "--percentile",
        type=percentile,
        default=99,
        help="share of requests that should be within targets (%(default)s)",
    )
    add("--stop-early", action="store_true", help="let answers end by themselves: for servers without ignore_eos")
    add(
        "--timeout",
        type=positive_seconds,
        default=600.0,
        metavar="S",
        help="give a request up after this long (%(default)s)",
    )
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        traffic = _traffic(args)
        report = asyncio.run(_measure(args, traffic))
    except (BadTrace, ValueError, OSError) as error:
        print(f"tidelane bench: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        console = Console()
        console.print(latency_table(report, f"{args.model} at {args.url}"))
        for line in notes(report):
            console.print(line, markup=False)
    return 0 if report.total.completed else 1


def _kind(text: str) -> Kind:
    try:
        return parse_kind(text)
    except ValueError as error:
        # argparse swallows the text of a ValueError.
        raise argparse.ArgumentTypeError(str(error)) from error


def _traffic(args: argparse.Namespace) -> Traffic:
    if args.trace:
        traffic = read_trace(args.trace).faster(args.speed)
        return traffic.first(args.duration) if args.duration else traffic
    kinds = args.mix or [parse_kind(text) for text in _DEFAULT_MIX]
    faster = [replace(kind, rate_rps=kind.rate_rps * args.speed) for kind in kinds]
    return poisson(faster, args.duration or 30.0, args.seed)


async def _measure(args: argparse.Namespace, traffic: Traffic) -> Report:
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
            tell=meter.follow,
        )
    return summarise(run, traffic.duration_s, slo)


async def _targets(args: argparse.Namespace) -> Slo | None:
    """Those given; else the server's own; None if it tells none."""
    if args.ttft_ms is None and args.tpot_ms is None:
        return (await read_metrics(args.url)).slo(args.percentile)
    if args.ttft_ms is None or args.tpot_ms is None:
        raise ValueError("--ttft-ms and --tpot-ms go together")
    return Slo(args.ttft_ms / 1000, args.tpot_ms / 1000, (args.ttft_per_1k_ms or 0.0) / 1000, args.percentile)
