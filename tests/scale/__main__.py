"""The operator at scale: `make scale-test`, or `PYTHONPATH=tests python -m scale` with options for another size.

A real API server, agents that only say that engines run, and the operator as a process. Exits with 1 if an aim is
missed. The machine's other work slows it down; CPU time says more than seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.harness import Binaries, Cluster, sigterm_as_interrupt
from scale.report import Aims, document, missed, table
from scale.scenario import Outcome, Size, run


def main() -> int:
    usual = Size()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--agents", type=int, default=usual.agents)
    add("--services", type=int, default=usual.services)
    add("--processes", type=int, default=usual.processes, help="that hold the agents; one of them vanishes")
    add("--quiet", type=float, default=usual.quiet_s, metavar="S", help="how long nothing happens (%(default)s)")
    add("--move-after", type=float, default=usual.move_after_s, metavar="S", help="the operator's (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--logs", type=Path, metavar="FOLDER", help="keep the logs there")
    args = parser.parse_args()
    size = Size(args.agents, args.services, args.processes, quiet_s=args.quiet, move_after_s=args.move_after)
    with sigterm_as_interrupt(), TemporaryDirectory(prefix="scale-") as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(exist_ok=True)
        outcome = asyncio.run(_run(size, Path(folder), logs))
    failed = missed(outcome, Aims())
    print(table(outcome))
    for each in failed:
        print(f"missed: {each}")
    if args.json:
        args.json.write_text(json.dumps(document(outcome, failed), indent=2) + "\n")
    return 1 if failed else 0


async def _run(size: Size, folder: Path, logs: Path) -> Outcome:
    with Cluster(folder / "cluster", Binaries.find(), audit_reads=True) as cluster:
        return await run(size, cluster, logs)


if __name__ == "__main__":
    sys.exit(main())
