"""Proofs at large of KV below the device; each ends with a table, and with 1 if anything is not as it must be.

python -m tools.kv_proof text
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tools.kv_proof import tiny_model
from tools.kv_proof.conversations import conversations
from tools.kv_proof.crash import Model as CrashModel
from tools.kv_proof.crash import crash
from tools.kv_proof.pressure import CLIENTS, ROOM, Pressed, press
from tools.kv_proof.reference import TIE, Reference
from tools.kv_proof.serving import TieredEngine
from tools.kv_proof.text import Bench, Case, Compared, compare
from tools.live.rig import MODEL, above_zero, one_or_more, refusing, write_measurement

from tidelane.cli.traces import check_outputs, without_outputs
from tidelane.engine.bench.meter import Meter
from tidelane.engine.http.tokenizer import Tokenizer
from tidelane.engine.lanes.cores import leave_compute_to_lanes
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.model.store import default_store, resolve
from tidelane.rpc.wire import ExecutionMode

_MODES = (ExecutionMode.MIXED_BATCH, ExecutionMode.LANES)
_TINY = "tiny"
_TINY_MODEL = "tiny, random"


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
    return run(args)


def _text(args: argparse.Namespace) -> int:
    leave_compute_to_lanes()
    with (
        tempfile.TemporaryDirectory(prefix="kv-proof-model-") as scratch,
        Meter(Console(stderr=True), "Loading the model") as meter,
    ):
        tiny = args.model == _TINY
        folder = tiny_model.save(Path(scratch), args.seed) if tiny else resolve(args.model, default_store(), meter.tell)
        tokenizer = Tokenizer.load(folder, lambda: datetime.now(tz=UTC))
        bench = Bench(
            load(folder, "float32", None, torch.device("cpu")),
            tuple(sorted(os.sched_getaffinity(0))),
            conversations(args.conversations, tokenizer, args.seed),
            Path(scratch),
            args.seed,
        )
        compared = [compare(bench, Case(mode, at_once), meter.tell) for mode in _MODES for at_once in (1, args.at_once)]
    _show(compared)
    about = {"model": args.model, "dtype": "float32", "conversations": args.conversations}
    return _ended(args, about, compared, [fault for each in compared for fault in each.faults])


def _crash(args: argparse.Namespace) -> int:
    leave_compute_to_lanes()
    with (
        tempfile.TemporaryDirectory(prefix="kv-proof-") as scratch,
        Meter(Console(stderr=True), "Loading the model") as meter,
    ):
        model, loaded = _tiny(Path(scratch, "model"), args.seed)
        with Reference(loaded, sorted(os.sched_getaffinity(0)), model.banned) as reference:
            told = asyncio.run(crash(model, reference, Path(scratch), args.kills, args.seed, meter.tell))
    tokens, ties = sum(life.tokens for life in told.lives), sum(life.ties for life in told.lives)
    figures = {
        "kills": len(told.lives),
        "answers compared, whole and cut short": sum(life.answered + life.cut for life in told.lives),
        "tokens equal to those of an engine without tiers": tokens,
        f"near ties (log-probabilities within {TIE:g}) that fell otherwise": ties,
        "blocks committed before the kills": told.committed,
        "of them hit again": f"{told.hit} ({100 * told.hit / max(1, told.committed):.1f} %)",
        "records torn by a kill, all of them misses": sum(life.torn for life in told.lives),
        "seconds": round(told.seconds),
    }
    _list("An engine that stores KV on a disk, killed at random moments", figures)
    return _ended(args, {"model": _TINY_MODEL, "dtype": "float32"}, told.lives, told.faults)


def _pressure(args: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="kv-proof-") as scratch,
        Meter(Console(stderr=True), "Starting the engine") as meter,
    ):
        pressed = asyncio.run(_pressed(Path(scratch), args.seconds, args.seed, meter.tell))
    figures = {
        "requests sent": pressed.sent,
        "answered": pressed.answered,
        "left by their clients": pressed.left,
        "pre-empted": pressed.preemptions,
        "blocks that made room on the device": pressed.evictions,
        "blocks fetched from the disk": pressed.fetched_blocks,
        "blocks held at the end": pressed.used_blocks,
        "answered after, median": f"{pressed.median_s:.1f} s",
        "answered after, p99": f"{pressed.p99_s:.1f} s",
        "answered after, slowest": f"{pressed.slowest_s:.1f} s, {pressed.slowest_over_median:.1f} times the median",
        "seconds": round(pressed.seconds),
    }
    _list(f"{CLIENTS} clients, and room for four sequences", figures)
    return _ended(args, {"model": MODEL, "dtype": "float32"}, [pressed], pressed.faults)


async def _pressed(folder: Path, seconds: float, seed: int, tell: Callable[[str, int, int], None]) -> Pressed:
    with TieredEngine(folder, ROOM) as engine:
        await engine.served.until_ready()
        pressed = await press(engine, seconds, seed, tell)
        await engine.end()
    return pressed


def _tiny(folder: Path, seed: int) -> tuple[CrashModel, LoadedModel]:
    tiny_model.save(folder, seed)
    tokenizer = Tokenizer.load(folder, lambda: datetime.now(tz=UTC))
    loaded = load(folder, "float32", None, torch.device("cpu"))
    layout = loaded.facts.kv_layout

    def encode(text: str) -> tuple[int, ...]:
        return tokenizer.encode(text, len(text))

    banned = tiny_model.NOT_TEXT
    return CrashModel(f"file://{folder}", encode, banned, layout.block_tokens, layout.block_bytes), loaded


def _list(title: str, figures: Mapping[str, object]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right")
    for name, figure in figures.items():
        table.add_row(name, str(figure))
    Console().print(table)


def _show(compared: Sequence[Compared]) -> None:
    table = Table(title="Text with KV pushed out between turns, against the same launches all resident")
    table.add_column("case", no_wrap=True)
    columns = ("turns", "tokens", "differ", "launches", "device", "host", "disk", "own", "s")
    for column in columns:
        table.add_column(column, justify="right")
    for each in compared:
        figures = (each.turns, each.tokens, len(each.differing), each.launches, each.on_device, each.from_host)
        rest = (each.from_disk, each.own_batches, round(each.seconds))
        table.add_row(each.case, *map(str, (*figures, *rest)))
    console = Console()
    console.print(table)
    console.print(
        "differ: answers that are not the same, token for token. device, host, disk: blocks by where they were found. "
        "own: answers that differ where the resident engine composes its batches itself, which is no fault.",
        highlight=False,
    )


def _ended(args: argparse.Namespace, about: dict[str, Any], results: Sequence[Any], faults: Sequence[str]) -> int:
    for fault in faults:
        print(f"NOT AS IT MUST BE: {fault}")
    if args.json is not None:
        words = " ".join(["python -m tools.kv_proof", *without_outputs(sys.argv[1:])])
        figures = {"command": words, "seed": args.seed, **about}
        write_measurement(args.json, figures | {"results": [dataclasses.asdict(each) for each in results]})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(refusing(main))
