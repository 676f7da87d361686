"""`tidelane profile`: measure how long a model's passes take on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tidelane.cli.compute import add_compute_arguments
from tidelane.cli.numbers import positive_seconds
from tidelane.cli.targets import BadOption
from tidelane.cli.traces import check_output

if TYPE_CHECKING:  # it imports torch, and `--help` should not wait for that
    from tidelane.engine.profiling.verdict import Finding, Verdict

_DESCRIPTION = """Times decode steps, prefill passes, both fused and both side by side, on every split of this machine's
cores, and fits the model of times by which an engine decides. Run it while the machine does nothing else."""
_DEFAULT_SECONDS = 150.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("profile", help="measure a model's step times", description=_DESCRIPTION)
    add_compute_arguments(parser)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write the profile (in the folder profiles of the model store, under a name made of the model's "
        "digest, device, cores and dtype, where `tidelane serve` finds it by itself)",
    )
    add(
        "--seconds",
        type=positive_seconds,
        default=_DEFAULT_SECONDS,
        metavar="S",
        help="time to measure, once the model is loaded (%(default)g); with less, long passes are left out",
    )
    add("--seed", type=int, default=0, help="of the order of passes (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tidelane.engine.bench.meter import Meter
    from tidelane.engine.errors import CannotServe
    from tidelane.engine.lanes.spinning import limit_spinning

    limit_spinning(os.environ)  # before torch is imported
    from tidelane.engine.config import ComputeConfig
    from tidelane.engine.estimation.profile import write_profile
    from tidelane.engine.model.store import default_store
    from tidelane.engine.profiling.machine import profile
    from tidelane.engine.profiling.verdict import TooFewPoints

    if args.out is not None:
        try:
            check_output("--out", args.out)
        except BadOption as error:
            print(f"tidelane profile: {error}", file=sys.stderr)
            return 2
    config = ComputeConfig(
        model=args.model,
        model_store=args.model_store or default_store(),
        dtype=args.dtype,
        max_context_tokens=args.max_context_tokens or None,
        kv_pool_bytes=args.kv_pool_memory or None,
        cores=args.cores,
    )
    try:
        with Meter(Console(stderr=True), "Loading the model") as meter:
            profiled = profile(
                config,
                budget_s=args.seconds,
                seed=args.seed,
                tell=lambda text, done, of: meter.tell(text, done, of or None),
            )
        out = args.out or profiled.kept_at
        out.parent.mkdir(parents=True, exist_ok=True)
        write_profile(out, profiled.verdict.profile)
    except CannotServe as error:
        print(f"tidelane profile: {error}", file=sys.stderr)
        return 2
    except TooFewPoints as error:
        print(f"tidelane profile: {error}; give it longer with --seconds", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tidelane profile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tidelane profile: stopped; nothing was written", file=sys.stderr)
        return 130
    show(profiled.verdict, out)
    return 0


def show(verdict: Verdict, out: Path) -> None:
    """How near predictions come to points that were held out, on stdout."""
    key, contention = verdict.profile.key, verdict.profile.contention
    console = Console()
    console.print(_table(verdict.findings, f"{key.device}, {key.units} units, {key.dtype}"))
    console.print(
        f"Side by side, decode takes {contention.decode_slowdown:.2f} times as long (at most {contention.guard:.2f}), "
        f"prefill {contention.prefill_slowdown:.2f} times."
    )
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    console.print(f"Load average {load}. Written to {out}", soft_wrap=True, highlight=False)


def _table(findings: tuple[Finding, ...], title: str) -> Table:
    table = Table(title=title, caption="errors of predicted times, at points held out from the fit")
    for column in ("phase", "units", "points", "median", "p90", "prior's median", "prior's p90", "beats it by"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for each in findings:
        table.add_row(
            each.phase.value,
            "all" if each.units is None else str(each.units),
            str(each.points),
            *(f"{error:.1%}" for error in (*each.error, *each.prior)),
            f"{each.gain:.1f}x",
            end_section=each.units is None,
        )
    return table
