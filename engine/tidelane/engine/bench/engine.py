"""`make bench-engine`: the engine's speed as ratios, each measured in one run on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tidelane.engine.bench.meter import Meter
from tidelane.engine.bench.ratio import Ratio
from tidelane.engine.errors import CannotServe
from tidelane.engine.lanes.spinning import limit_spinning
from tidelane.engine.whole_file import write_whole

CASES = ("single-stream", "batching", "loop-work", "lanes", "decisions", "handover", "http")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        ratios = _measure(args, console)
    except CannotServe as error:
        console.print(f"bench-engine: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        write_whole(args.json, json.dumps([_plain(ratio) for ratio in ratios], indent=2) + "\n")
    return exit_code(ratios, strict=args.strict)


def _measure(args: argparse.Namespace, console: Console) -> list[Ratio]:
    """Each ratio is printed as soon as it is known."""
    limit_spinning(os.environ)
    # Only now: these import torch.
    import torch

    from tidelane.engine.bench import decision_case, engine_cases, handover_case, http_case
    from tidelane.engine.lanes.cores import leave_compute_to_lanes
    from tidelane.engine.model.loading import load
    from tidelane.engine.model.store import default_store, resolve

    cases = (
        engine_cases.single_stream,
        engine_cases.batching,
        engine_cases.loop_work,
        engine_cases.lanes_against_mixed,
        decision_case.decisions,
        handover_case.handover,
        http_case.http_cost,
    )
    leave_compute_to_lanes()
    loaded = load(resolve(args.model, default_store(), console.print), "float32", None, torch.device("cpu"))
    cores = args.cores or tuple(sorted(os.sched_getaffinity(0)))
    ratios: list[Ratio] = []
    for name, case in zip(CASES, cases, strict=True):
        if args.only and name not in args.only:
            continue
        with Meter(console, f"Measuring {name}, {args.rounds} rounds"):
            found = case(loaded, cores, args.rounds)
        for ratio in found:
            print(ratio, flush=True)
        ratios += found
    return ratios


def exit_code(ratios: Sequence[Ratio], *, strict: bool) -> int:
    """A miss fails only when it is asked to: on a busy machine it may say more of the machine than of the engine."""
    return 1 if strict and not all(ratio.met for ratio in ratios) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="builtin://smollm2-135m-instruct", metavar="SOURCE")
    add("--only", action="append", choices=CASES, help="measure this alone (may be repeated)")
    add("--rounds", type=int, default=3, metavar="N", help="samples of each side; medians count (%(default)s)")
    add(
        "--cores",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        metavar="0,1",
        help="cores to use (all)",
    )
    add("--json", type=Path, metavar="FILE", help="write all samples there")
    add("--strict", action="store_true", help="exit with 1 if a ratio misses what is wanted")
    return parser


def _plain(ratio: Ratio) -> dict[str, object]:
    return dataclasses.asdict(ratio) | {"value": ratio.value, "met": ratio.met}


if __name__ == "__main__":
    sys.exit(main())
