"""What the proofs say in the end: a table, what is not as it must be, and JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tools.kv_proof.crash import Crashed
from tools.kv_proof.pressure import CLIENTS, Pressed
from tools.kv_proof.reference import TIE
from tools.kv_proof.text import Compared
from tools.live.rig import write_measurement

from tidelane.cli.traces import without_outputs

# Where standard output is no terminal, a line would have 80.
_TABLE_CHARS = 112


def show_text(compared: Sequence[Compared]) -> None:
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
    console.width = max(console.width, _TABLE_CHARS)
    console.print(table)
    console.print(
        "differ: answers that are not the same, token for token. device, host, disk: blocks by where they were found. "
        "own: answers that differ where the resident engine composes its batches itself, which is no fault.",
        highlight=False,
    )


def show_crash(told: Crashed) -> None:
    figures = {
        "kills": len(told.lives),
        "answers compared, whole and cut short": sum(life.answered + life.cut for life in told.lives),
        "tokens equal to those of an engine without tiers": sum(life.tokens for life in told.lives),
        f"near ties (within {TIE:g}) that fell otherwise": sum(life.ties for life in told.lives),
        "streams cut short": sum(life.cut for life in told.lives),
        "blocks committed before the kills": told.committed,
        "of them whole in the file after the kill": _of(told.kept, told.committed),
        "of them hit again": _of(told.hit, told.committed),
        "older blocks that made room meanwhile": sum(life.evicted for life in told.lives),
        "records torn by a kill, each of them a miss": sum(life.torn for life in told.lives),
        "seconds": round(told.seconds),
    }
    _show("An engine that stores KV on a disk, killed at random moments", figures)


def show_pressure(pressed: Pressed) -> None:
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
    _show(f"{CLIENTS} clients, and room for four sequences", figures)


def ended(
    words: Sequence[str], out: Path | None, about: Mapping[str, Any], results: Sequence[Any], faults: Sequence[str]
) -> int:
    """The exit code. `words` are the options given, `results` dataclasses."""
    for fault in faults:
        print(f"NOT AS IT MUST BE: {fault}")
    if out is not None:
        command = f"python -m tools.kv_proof {shlex.join(without_outputs(words))}"
        plain = [dataclasses.asdict(each) for each in results]
        write_measurement(out, {"command": command, **about, "results": plain, "faults": list(faults)})
    return 1 if faults else 0


def _of(part: int, whole: int) -> str:
    return f"{part} ({100 * part / max(1, whole):.1f} %)"


def _show(title: str, figures: Mapping[str, object]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for name, figure in figures.items():
        table.add_row(name, str(figure))
    Console().print(table)
