"""Telling a person how far something is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tidelane.engine.bench.load import Progress

_LINE_EVERY_S = 10.0


class Meter:
    """A bar with `total` parts, or one that only moves. Without a terminal, each new text is a line of its own."""

    def __init__(self, console: Console, text: str, total: int | None = None) -> None:
        self._console = console
        self._text = text
        # Four redraws a second: drawing more often takes processor time from whatever is waited for.
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        else:
            self._line(self._text)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def tell(self, text: str, done: int = 0, total: int | None = None) -> None:
        """`total` where it was not known before."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=text, completed=done, total=total)
        elif text != self._text:
            self._line(text)
        self._text = text

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


class LoadMeter(Meter):
    """Hand `follow` to `generate`."""

    def __init__(self, console: Console, requests: int) -> None:
        super().__init__(console, f"Sending {requests} requests", requests)
        self._requests = requests
        self._every_s = 0.0 if console.is_terminal else _LINE_EVERY_S
        self._next_s = self._every_s

    def follow(self, progress: Progress) -> None:
        if progress.elapsed_s < self._next_s:
            return
        self._next_s += self._every_s
        text = f"{progress.done - progress.failed} of {self._requests} requests answered, {progress.open} under way"
        if progress.failed:
            text += f", {progress.failed} failed"
        self.tell(text, progress.done)
