"""`tidelane kv-bench`: does it pay to keep KV below the device, on this machine?"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tidelane.cli.compute import cores
from tidelane.cli.numbers import count_from_1
from tidelane.cli.targets import BadOption
from tidelane.cli.traces import check_output, without_outputs
from tidelane.engine.whole_file import write_whole

if TYPE_CHECKING:  # it imports torch, and `--help` should not wait for that
    from tidelane.engine.bench.kv_report import KvReport

_DESCRIPTION = """Measures, in one run: how soon the next turn of a conversation is answered whose KV is found on the
device, in host memory or on the disk, or is computed again; how fast KV is copied and read, against memcpy and raw
reads; and what decode pays for copies beside it. A target that is missed is told as missed; the exit code is 0 all the
same. Run it while the machine does nothing else."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "kv-bench", help="measure whether it pays to keep KV below the device", description=_DESCRIPTION
    )
    add = parser.add_argument
    add(
        "--model",
        default="builtin://smollm2-135m-instruct",
        metavar="SOURCE",
        help="builtin://NAME, hf://ORG/NAME[@REV], file:///PATH (%(default)s)",
    )
    add("--model-store", type=Path, metavar="DIR", help="where fetched and converted models are kept")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--cores", type=cores, default=(), metavar="0,1", help="CPU cores that compute (all); copies may use others")
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="on the disk to be measured; what is written there is deleted again (%(default)s)",
    )
    add("--history-tokens", type=count_from_1, default=4000, metavar="N", help="of the conversation (%(default)s)")
    add("--rounds", type=count_from_1, default=5, metavar="N", help="of each case; medians count (%(default)s)")
    add("--steps", type=count_from_1, default=100, metavar="N", help="of decode in each round (%(default)s)")
    add("--json", type=Path, metavar="OUT", help="write all figures there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tidelane.engine.lanes.spinning import limit_spinning

    try:
        _check(args)
    except BadOption as error:
        print(f"tidelane kv-bench: {error}", file=sys.stderr)
        return 2
    limit_spinning(os.environ)  # before torch is imported
    from tidelane.engine.bench.kv import measure
    from tidelane.engine.bench.kv_rates import MovesLost
    from tidelane.engine.bench.kv_report import Sizes, table
    from tidelane.engine.bench.kv_turns import OtherCase
    from tidelane.engine.bench.meter import Meter
    from tidelane.engine.config import ComputeConfig
    from tidelane.engine.errors import CannotServe
    from tidelane.engine.model.store import default_store

    config = ComputeConfig(
        model=args.model, model_store=args.model_store or default_store(), dtype=args.dtype, cores=args.cores
    )
    sizes = Sizes(history_tokens=args.history_tokens, rounds=args.rounds, steps=args.steps)
    try:
        with _ended_by_sigterm(), Meter(Console(stderr=True), "Loading the model") as meter:
            report = measure(config, sizes, args.folder, meter.tell)
    except CannotServe as error:
        print(f"tidelane kv-bench: {error}", file=sys.stderr)
        return 2
    except (OtherCase, MovesLost, OSError) as error:
        print(f"tidelane kv-bench: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.print(table(report))
    for line in report.notes:
        console.print(line, markup=False, highlight=False)
    try:
        if args.json is not None:
            _write(args, report)
    except OSError as error:
        print(f"tidelane kv-bench: the figures above could not be written: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, too, lets all that is under way end: what was written to the disk is deleted again."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _check(args: argparse.Namespace) -> None:
    if not args.folder.is_dir():
        raise BadOption(f"--folder: {args.folder} is no folder: make it first")
    if args.json is not None:
        check_output("--json", args.json)


def _write(args: argparse.Namespace, report: KvReport) -> None:
    from tidelane.engine.bench.kv_report import as_json

    versions = {name: importlib.metadata.version(name) for name in ("tidelane", "torch")}
    about = {
        "measured": datetime.now(tz=UTC).date().isoformat(),
        "versions": versions | {"python": platform.python_version()},
        "command": shlex.join(["tidelane", *without_outputs(args.words)]),
    }
    write_whole(args.json, json.dumps(about | as_json(report), indent=1) + "\n")
