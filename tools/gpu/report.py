"""What a group of checks has in common: its arguments, its time, and a line of JSON for each check."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Last, so that the real packages win where they are installed.
sys.path.append(str(Path(__file__).parent / "stand_ins"))


@dataclass
class Finding:
    """`ok` None: nothing was demanded."""

    summary: str
    ok: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    results: Path
    out: Path
    dry_run: bool
    end_s: float

    @staticmethod
    def from_arguments() -> Report:
        parser = argparse.ArgumentParser()
        parser.add_argument("--results", type=Path, required=True)
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--until", type=float, required=True, help="seconds of CLOCK_MONOTONIC")
        parser.add_argument("--dry-run", action="store_true")
        found = parser.parse_args()
        return Report(found.results, found.out, found.dry_run, found.until)

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def check(self, name: str, most_s: float, run: Callable[[float], Finding]) -> None:
        """Run one check, which is told when to stop (on `time.monotonic`), and write down what comes of it."""
        begun_s = time.monotonic()
        if self.left_s() < 1:
            finding = Finding("not run: the group's time is up", ok=False)
        else:
            try:
                finding = run(min(begun_s + most_s, self.end_s))
            except Exception as error:
                # Whatever one check dies of, the others have something to say.
                traceback.print_exc()
                lines = traceback.format_exc().splitlines()
                finding = Finding(f"{type(error).__name__}: {error}"[:300], ok=False, data={"trace": lines[-12:]})
        seconds = round(time.monotonic() - begun_s, 1)
        ok = finding.ok is not False
        line = {"check": name, "ok": ok, "summary": finding.summary, "seconds": seconds, "data": finding.data}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{'ok  ' if ok else 'FAIL'} {name} ({seconds} s): {finding.summary}", flush=True)
