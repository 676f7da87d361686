"""The same traffic live on this machine and in virtual time, policy by policy: how true to life the simulator is.

    python -m tools.live.against_simulation --minutes 5 --json live.json

Measures a profile first unless one is given. Each mode then serves the traffic with `tidelane serve` and `tidelane
bench` as processes, and the simulator replays it from the profile. Prints both, how far they are apart, and the order
of policies by goodput. On a busy machine it measures the others: the load average stands in the table.

A shared machine's speed drifts by a fifth within minutes, and front and clients take their part of the cores. So one
lone answer is timed before each mode's traffic and one after it: what their tokens take, over what the simulator says
of them, is that mode's `pace`, by which it stretches all times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from tools.live.rig import (
    COMPARED,
    MODEL,
    NAME,
    above_zero,
    chats_and_documents,
    modes,
    one_or_more,
    parser,
    refusing,
    running_engine,
    tidelane,
    write_measurement,
)

from tidelane.cli.targets import parse_slo
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.report import Spread
from tidelane.engine.bench.traffic import Arrival, Traffic, poisson
from tidelane.engine.estimation.profile import Profile, read_profile
from tidelane.engine.scheduling.policies import live_policies
from tidelane.engine.sim.figures import Figures, figures_of
from tidelane.engine.sim.machine import Machine, as_profiled
from tidelane.engine.sim.world import Settings, replay
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode

MODES = (ExecutionMode.MIXED_BATCH, ExecutionMode.CHUNKED_PREFILL, ExecutionMode.LANES, ExecutionMode.AUTO)
LONE = Arrival(0.0, 40, 96)


@dataclass(frozen=True, slots=True)
class Point:
    """What live and simulated runs are compared by, in milliseconds."""

    attainment: float
    goodput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float


def main() -> int:
    args = _parser().parse_args()
    slo = parse_slo(args.slo)
    check_outputs(args.json, None)
    traffic = poisson(chats_and_documents(args.chats, args.documents), 60 * args.minutes, args.seed)
    with TemporaryDirectory() as folder:
        profile = read_profile(args.profile or _measured(Path(folder)))
        trace = Path(folder) / "traffic.jsonl"
        trace.write_text("".join(_row(each.at_s, each.input_tokens, each.output_tokens) for each in traffic.arrivals))
        lone = Path(folder) / "lone.jsonl"
        lone.write_text(_row(LONE.at_s, LONE.input_tokens, LONE.output_tokens))
        live, lone_tpot_ms = {}, {}
        for mode in args.modes:
            live[mode], lone_tpot_ms[mode] = _live(mode, trace, lone, args.slo, slo, Path(folder))
    machine = as_profiled(profile, args.kv_tokens)
    alone = _simulated(args.modes[0], Traffic((LONE,), 1.0), machine, slo).tpot_p50
    paces = {mode: each / alone for mode, each in lone_tpot_ms.items()}
    simulated = {mode: _simulated(mode, traffic, _slower(machine, paces[mode]), slo) for mode in args.modes}
    _show(traffic, profile, live, simulated, paces)
    if args.json is not None:
        figures = {
            "slo": asdict(slo),
            "requests": len(traffic.arrivals),
            "load_average": os.getloadavg(),
            "modes": {
                mode: {"pace": paces[mode], "live": asdict(live[mode]), "simulated": asdict(simulated[mode])}
                for mode in args.modes
            },
        }
        write_measurement(args.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, slo="ttft=1s,ttftPer1k=4s,tpot=150ms")
    add = options.add_argument
    add("--minutes", type=above_zero, default=5.0, help="of traffic, for each mode (%(default)g)")
    add("--modes", type=lambda text: modes(text, MODES), default=COMPARED)
    add("--chats", type=above_zero, default=0.5, help="short requests a second (%(default)g)")
    add("--documents", type=above_zero, default=0.05, help="long requests a second (%(default)g)")
    add("--profile", type=Path, help="of this machine, from `tidelane profile` (else it is measured)")
    add("--kv-tokens", type=one_or_more, default=11_000, help="that the engine's pool holds (%(default)s)")
    return options


def _row(at_s: float, input_tokens: int, output_tokens: int) -> str:
    return json.dumps({"at_s": at_s, "input_tokens": input_tokens, "output_tokens": output_tokens}) + "\n"


def _measured(folder: Path) -> Path:
    out = folder / "profile.json"
    subprocess.run(tidelane("profile", "--model", MODEL, "--out", str(out)), check=True)
    return out


def _live(mode: ExecutionMode, trace: Path, lone: Path, targets: str, slo: Slo, folder: Path) -> tuple[Point, float]:
    """What the traffic met, and what tokens of a lone answer took before and after it, in milliseconds."""
    with running_engine(mode, slo) as url:
        before = _bench(url, lone, targets, folder)
        point = _bench(url, trace, targets, folder)
        after = _bench(url, lone, targets, folder)
    return point, (before.tpot_p50 + after.tpot_p50) / 2


def _bench(url: str, trace: Path, targets: str, folder: Path) -> Point:
    report = folder / "report.json"
    words = ("--url", url, "--model", NAME, "--trace", str(trace), "--format", "jsonl", "--slo", targets)
    subprocess.run(tidelane("bench", *words, "--json", str(report)), check=True, stdout=subprocess.DEVNULL)
    (policy,) = json.loads(report.read_text())["policies"].values()
    (point,) = policy["points"]
    ttft, tpot = point["ttft_ms"], point["tpot_ms"]
    return Point(point["attainment"], point["goodput_per_gpu"], ttft["p50"], ttft["p99"], tpot["p50"], tpot["p99"])


def _slower(machine: Machine, pace: float) -> Machine:
    times = {
        phase: {units: each.scaled(pace) for units, each in by_units.items()}
        for phase, by_units in machine.times.times.items()
    }
    estimates = replace(machine.times, times=times)
    return replace(machine, times=estimates, believed=estimates)


def _simulated(mode: str, traffic: Traffic, machine: Machine, slo: Slo) -> Point:
    done = replay(traffic, machine, lambda: live_policies(machine.table)[mode], Settings(slo))
    return _point(figures_of(done, traffic.rate_rps, slo))


def _point(figures: Figures) -> Point:
    def ms(spread: Spread | None, part: str) -> float:
        return 1000 * getattr(spread, part) if spread is not None else float("nan")

    return Point(
        figures.attainment,
        figures.goodput,
        ms(figures.ttft, "p50_s"),
        ms(figures.ttft, "p99_s"),
        ms(figures.tpot, "p50_s"),
        ms(figures.tpot, "p99_s"),
    )


def _show(
    traffic: Traffic,
    profile: Profile,
    live: dict[str, Point],
    simulated: dict[str, Point],
    paces: dict[str, float],
) -> None:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    table = Table(
        title=f"{len(traffic.arrivals)} requests in {traffic.duration_s:.0f} s; profile of {profile.measured}; "
        f"load average {load}",
        title_justify="left",
    )
    for column in ("mode", "", "in SLO", "goodput", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        table.add_column(column, justify="left" if column in ("mode", "") else "right", no_wrap=True)
    for mode, true in live.items():
        found = simulated[mode]
        pairs = [
            (getattr(true, name), getattr(found, name)) for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
        ]
        table.add_row(mode, "live", f"{true.attainment:.0%}", f"{true.goodput:.3f}", *(f"{a:.0f}" for a, _ in pairs))
        table.add_row(
            f"pace {paces[mode]:.2f}",
            "simulated",
            f"{found.attainment:.0%}",
            f"{found.goodput:.3f}",
            *(f"{b:.0f}" for _, b in pairs),
        )
        table.add_row("", "apart", "", "", *(f"{b / a - 1:+.0%}" for a, b in pairs), end_section=True)
    console = Console()
    console.print(table)
    console.print("Goodput in requests a second, latencies in milliseconds.", highlight=False)
    for name, points in (("live", live), ("simulated", simulated)):
        order = sorted(points, key=lambda mode: -points[mode].goodput)
        console.print(f"By goodput, {name}: {', '.join(order)}", highlight=False)


if __name__ == "__main__":
    sys.exit(refusing(main))
