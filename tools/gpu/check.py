"""Runs the groups of checks, each in a process of its own that may fail or hang, and sums up.

A group writes a line of JSON for each check as it ends, so what a dead group has found is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Seconds for each group, in the order in which they matter. With the starts of processes, under 8 minutes.
GROUPS = {"tokens": 110, "lanes": 60, "serving": 290}
# Beyond its budget a group is given this long to end by itself.
GRACE_S = 5.0

Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the tokens of small models, on the CPU")
    parser.add_argument("--only", choices=sorted(GROUPS), action="append", help="this group (may be repeated)")
    arguments = parser.parse_args()
    chosen = arguments.only or (["tokens"] if arguments.dry_run else list(GROUPS))
    out = Path(os.environ.get("OUT", "."))
    begun_s = time.monotonic()
    results: list[Result] = []
    for group in (group for group in GROUPS if group in chosen):
        results += run_group(group, GROUPS[group], out, dry_run=arguments.dry_run)
        # After every group: what comes next may take the machine down.
        (out / "gpu-check.json").write_text(json.dumps({"checks": results}, indent=1))
    print(f"\n{table(results)}\n{time.monotonic() - begun_s:.0f} s; details in {out / 'gpu-check.json'}")
    return 0 if all(result["ok"] for result in results) else 1


def run_group(group: str, budget_s: float, out: Path, *, dry_run: bool) -> list[Result]:
    print(f"\n== {group}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "results"
        command = [sys.executable, "-m", f"tools.gpu.{group}", "--results", str(lines), "--out", str(out)]
        command += ["--until", str(time.monotonic() + budget_s), *(["--dry-run"] if dry_run else [])]
        try:
            code = subprocess.run(command, timeout=budget_s + GRACE_S, check=False).returncode
            ending = f"ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ending = f"did not end within {budget_s:.0f} s"
        results = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if ending:
        results.append({"check": f"{group}: to its end", "ok": False, "summary": ending})
    return results


def table(results: list[Result]) -> str:
    width = max((len(result["check"]) for result in results), default=0)
    return "\n".join(
        f"{'ok  ' if result['ok'] else 'FAIL'}  {result['check']:{width}}  {result['summary']}" for result in results
    )


if __name__ == "__main__":
    sys.exit(main())
