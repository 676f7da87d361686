"""A progress bar for a load run; without a terminal, a line now and then."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tidelane.engine.bench.load import Progress
from tidelane.engine.bench.traffic import Traffic

_LINE_EVERY_S = 10.0


class LoadMeter:
    """Hand `tell` to `generate`."""

    def __init__(self, console: Console, traffic: Traffic) -> None:
        self._console = console
        self._total = len(traffic.arrivals)
        self._next_line_s = _LINE_EVERY_S
        # Four redraws a second: drawing more often takes processor time from the server under test.
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=console, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task("sending traffic", total=self._total, said="")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def tell(self, progress: Progress) -> None:
        said = f"{progress.done} of {self._total} answered, {progress.open} under way"
        if progress.failed:
            said += f", {progress.failed} failed"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=progress.done, said=said)
        elif progress.elapsed_s >= self._next_line_s:
            self._next_line_s += _LINE_EVERY_S
            self._console.print(f"  {progress.elapsed_s:.0f} s: {said}", markup=False, highlight=False)
