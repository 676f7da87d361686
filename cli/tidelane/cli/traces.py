"""Trace files in and reports out, on the command line: alike for `bench`, `simulate` and `plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tidelane.cli.targets import BadOption
from tidelane.engine.bench.traces import MOONCAKE_TICK_S, TraceFormat, read_trace, within_ticks
from tidelane.engine.bench.traffic import Traffic

FORMAT_HELP = f"of the trace: {', '.join(TraceFormat)} (by the file's name)"


def replayed(path: Path, form: str | None, limit: int | None, seed: int) -> tuple[Traffic, tuple[str, ...]]:
    """The trace, the first `limit` requests of it unless None, and what was done to it."""
    if form is not None and form not in tuple(TraceFormat):
        raise BadOption(f"--format: {form!r} is none of {', '.join(TraceFormat)}")
    try:
        traffic = read_trace(path, None if form is None else TraceFormat(form))
    except OSError as error:
        raise BadOption(f"--trace: {error}") from error
    notes: tuple[str, ...] = ()
    if any(arrival.hash_ids for arrival in traffic.arrivals):
        traffic = within_ticks(traffic, MOONCAKE_TICK_S, seed)
        notes = (f"The trace tells arrivals to {MOONCAKE_TICK_S:g} s: each is moved within them, at random.",)
    return (traffic if limit is None else traffic.limited(limit)), notes


def check_outputs(json: Path | None, html: Path | None, trace: Path | None = None) -> None:
    """That each can be written, to a file of its own that is not the `trace` read."""
    taken = {} if trace is None else {trace.resolve(): "--trace"}
    for option, path in (("--json", json), ("--html", html)):
        if path is None:
            continue
        if path.resolve() in taken:
            raise BadOption(f"{option}: {path} is the file of {taken[path.resolve()]} as well: name another one")
        taken[path.resolve()] = option
        check_output(option, path)


def check_output(option: str, path: Path) -> None:
    """Before the work, not after it: that the file can be written."""
    if not path.absolute().parent.is_dir():
        raise BadOption(f"{option}: {path}: there is no folder {path.parent}: make it first")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise BadOption(f"{option}: {path} cannot be written: {error.strerror}") from error
    if not existed:
        path.unlink()


def without_outputs(words: Sequence[str]) -> Iterator[str]:
    """The words that decide about figures: the same ones give the same file, whatever its name."""
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name not in ("--json", "--html", "--processes"):
            yield word
        elif not equals:
            next(left, None)
