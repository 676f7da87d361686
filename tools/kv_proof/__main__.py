"""Proofs at large of KV below the device; each ends with a table, and with 1 if anything is not as it must be.

- text: conversations whose KV leaves for host memory and disk between turns answer as if it had stayed
- crash: an engine that is killed at random moments and started again on its disk serves nothing wrong, and finds it all
- pressure: 64 clients, and room for four sequences: no deadlock, no lost request, no block that nobody holds
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tools.kv_proof import tiny_model
from tools.kv_proof.conversations import conversations
from tools.kv_proof.crash import crash, tiny
from tools.kv_proof.pressure import ROOM, Pressed, press
from tools.kv_proof.reference import Reference
from tools.kv_proof.report import ended, show_crash, show_pressure, show_text
from tools.kv_proof.serving import TieredEngine
from tools.kv_proof.text import compare
from tools.kv_proof.text_runs import Bench, Case
from tools.live.rig import MODEL, above_zero, one_or_more, refusing

from tidelane.cli.targets import BadOption
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.meter import Meter
from tidelane.engine.errors import CannotServe
from tidelane.engine.http.tokenizer import Tokenizer
from tidelane.engine.lanes.cores import leave_compute_to_lanes
from tidelane.engine.model.loading import load
from tidelane.engine.model.store import default_store, resolve
from tidelane.rpc.wire import ExecutionMode

_MODES = (ExecutionMode.MIXED_BATCH, ExecutionMode.LANES)
_TINY = "tiny"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.kv_proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    shared.add_argument("--seed", type=int, default=0, help="of texts, orders and moments (%(default)s)")
    kinds = parser.add_subparsers(required=True)
    text = kinds.add_parser("text", parents=[shared], help="text is the same wherever KV was meanwhile")
    text.add_argument("--model", default=MODEL, help=f"a source, or `{_TINY}`: a random one (%(default)s)")
    text.add_argument("--conversations", type=one_or_more, default=50, metavar="N", help="(%(default)s)")
    text.add_argument("--at-once", type=one_or_more, default=16, metavar="N", help="besides one (%(default)s)")
    text.set_defaults(run=_text)
    crash = kinds.add_parser("crash", parents=[shared], help="nothing wrong comes back, and what was kept does")
    crash.add_argument("--kills", type=one_or_more, default=100, metavar="N", help="(%(default)s)")
    crash.set_defaults(run=_crash)
    pressure = kinds.add_parser("pressure", parents=[shared], help="no deadlock, no lost request, no leaked block")
    pressure.add_argument("--seconds", type=above_zero, default=300.0, metavar="S", help="(%(default)g)")
    pressure.set_defaults(run=_pressure)
    args = parser.parse_args()
    check_outputs(args.json, None)
    # So that the engine that was started ends, too, and what was written is deleted.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except CannotServe as error:
        raise BadOption(str(error)) from error


def _text(args: argparse.Namespace) -> int:
    leave_compute_to_lanes()
    with (
        tempfile.TemporaryDirectory(prefix="kv-proof-model-") as scratch,
        Meter(Console(stderr=True), "Loading the model") as meter,
    ):
        folder = (
            tiny_model.save(Path(scratch), args.seed)
            if args.model == _TINY
            else resolve(args.model, default_store(), meter.tell)
        )
        tokenizer = Tokenizer.load(folder, lambda: datetime.now(tz=UTC))
        bench = Bench(
            load(folder, "float32", None, torch.device("cpu")),
            tuple(sorted(os.sched_getaffinity(0))),
            conversations(args.conversations, tokenizer, args.seed),
            Path(scratch),
            args.seed,
        )
        compared = []
        for case in [Case(mode, at_once) for mode in _MODES for at_once in (1, args.at_once)]:
            compared.append(compare(bench, case, meter.tell))
            told = f"{compared[-1].tokens} tokens, {len(compared[-1].differing)} answers differ"
            meter.tell(f"{case.name}: {told}")
    show_text(compared)
    return _ended(args, args.model, compared, [fault for each in compared for fault in each.faults])


def _crash(args: argparse.Namespace) -> int:
    leave_compute_to_lanes()
    with (
        tempfile.TemporaryDirectory(prefix="kv-proof-") as scratch,
        Meter(Console(stderr=True), "Loading the model") as meter,
    ):
        model, loaded = tiny(Path(scratch, "model"), args.seed)
        with Reference(loaded, sorted(os.sched_getaffinity(0)), model.banned) as reference:
            told = asyncio.run(crash(model, reference, Path(scratch), args.kills, args.seed, meter.tell))
    show_crash(told)
    return _ended(args, "tiny, random", told.lives, told.faults)


def _pressure(args: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="kv-proof-") as scratch,
        Meter(Console(stderr=True), "Starting the engine") as meter,
    ):
        pressed = asyncio.run(_pressed(Path(scratch), args.seconds, args.seed, meter.tell))
    show_pressure(pressed)
    return _ended(args, MODEL, [pressed], pressed.faults)


def _ended(args: argparse.Namespace, model: str, results: Sequence[Any], faults: Sequence[str]) -> int:
    return ended(sys.argv[1:], args.json, {"model": model, "dtype": "float32", "seed": args.seed}, results, faults)


async def _pressed(folder: Path, seconds: float, seed: int, tell: Callable[[str, int, int], None]) -> Pressed:
    with TieredEngine(folder, ROOM) as engine:
        await engine.served.until_ready()
        pressed = await press(engine, seconds, seed, tell)
        await engine.end()
    return pressed


if __name__ == "__main__":
    sys.exit(refusing(main))
