"""Is a dry run right? Six changes of targets at a real engine under load: what simulation says, against what comes.

The engine reports its traffic and the times that it has found, as it does in a cluster. By these each change is
predicted, with the operator's own process and its own judgement of whether that is to be believed; then it is put in
force, and as much traffic of the same kind is sent. It ends with 1 if a verdict is wrong, if a simulation that was
believed is off by more than --within points, or if none was believed. Targets are made of what the engine takes under
this load on this machine, so that they divide its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from rich.console import Console
from rich.table import Table
from tools.kv_proof.serving import until_ready
from tools.live.rig import (
    MODEL,
    NAME,
    POOL_BYTES,
    above_zero,
    chats_and_documents,
    refusing,
    tidelane,
    write_measurement,
)

from tidelane.agent.control import EngineControl
from tidelane.cli.traces import check_outputs
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.traffic import poisson
from tidelane.engine.slo import Slo, Timeline, percentile
from tidelane.operator.forecasts import Forecast, Question
from tidelane.operator.prediction import Basis, Outlook, Prediction, Simulated, predict
from tidelane.operator.quantities import format_duration
from tidelane.operator.resources import Status
from tidelane.operator.simulation import Simulation
from tidelane.operator.targets import Targets
from tidelane.rpc.serving_pb2 import EngineStatus
from tidelane.rpc.wire import ExecutionMode, Objective, ShareBounds, Workload, objective_to_wire, workload_from_wire

_UNBOUNDED: Final = Slo(ttft_s=600.0, tpot_s=60.0, percentile=90)
# So near to what is asked for, chance decides which side measured attainment falls on.
_TOO_NEAR: Final = 5


@dataclass(frozen=True, slots=True)
class Tried:
    """One change: predicted from the traffic before it, and measured after it. In percent and seconds."""

    name: str
    objective: Objective
    forecast: Forecast
    prediction: Prediction
    attainment: float
    ttft_s: float
    tpot_s: float
    requests: int

    @property
    def off(self) -> float:
        return self.forecast.attainment - self.attainment

    @property
    def believed(self) -> bool:
        return self.prediction.basis is Basis.SIMULATED

    @property
    def verdict_wrong(self) -> bool:
        wanted, outlook = self.objective.slo.percentile, self.prediction.outlook
        if outlook is Outlook.UNKNOWN or abs(self.attainment - wanted) <= _TOO_NEAR:
            return False
        return (outlook is Outlook.MEET) != (self.attainment >= wanted)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--model", default=MODEL, help="(%(default)s)")
    add("--minutes", type=above_zero, default=5.0, help="of traffic before the changes and after each (%(default)g)")
    add("--chats", type=above_zero, default=0.4, help="short requests a second (%(default)g)")
    add("--documents", type=above_zero, default=0.03, help="long requests a second (%(default)g)")
    add("--within", type=above_zero, default=5.0, help="points that attainment may be off (%(default)g)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="OUT", help="write all figures there")
    args = options.parse_args()
    check_outputs(args.json, None)
    # However it is ended, the engine ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tried = asyncio.run(_try(args))
    _show(tried)
    if args.json is not None:
        figures = {"load_average": os.getloadavg(), "changes": [asdict(each) for each in tried]}
        write_measurement(args.json, figures)
    believed = [each for each in tried if each.believed]
    right = not any(each.verdict_wrong for each in tried) and all(abs(each.off) <= args.within for each in believed)
    return 0 if believed and right else 1


async def _try(args: argparse.Namespace) -> list[Tried]:
    console = Console(stderr=True)
    tried: list[Tried] = []
    simulation = Simulation(limit_s=600.0)
    in_force = Objective(_UNBOUNDED, ExecutionMode.LANES)
    async with _engine(args.model, replace(in_force, revision=1)) as (url, control):
        measured = await _load(args, url, 0)
        for number, (name, objective) in enumerate(_changes(measured), start=1):
            workload = await _workload(control)
            now, then = [await simulation.ask(Question(workload, each, 1)) for each in (in_force, objective)]
            if not isinstance(then, Forecast):
                raise SystemExit(f"{name}: {then.why}")
            prediction = predict(_status(in_force.slo, measured), _targets(objective.slo), Simulated(now, then))
            console.print(f"{name}: {prediction.outlook}, {prediction.message}", highlight=False)
            await control.set_objective(replace(objective, revision=number + 1))
            in_force, measured = objective, await _load(args, url, number)
            tried.append(_told(name, objective, then, prediction, measured))
            console.print(f"{name}: {tried[-1].attainment:.0f} % measured", highlight=False)
    return tried


def _changes(before: list[Timeline]) -> list[tuple[str, Objective]]:
    """As policies could ask for, made of what requests took without any target."""

    def ttft_s(percent: float) -> float:
        return percentile([each.ttft_s for each in before], percent)

    def tpot_s(percent: float) -> float:
        return percentile([each.tpot_s for each in before], percent)

    usual = Slo(1.5 * ttft_s(90), 1.2 * tpot_s(90), percentile=90)
    lanes = ExecutionMode.LANES
    return [
        ("tighten", Objective(replace(usual, ttft_s=ttft_s(90), tpot_s=tpot_s(60)), lanes)),
        ("loosen", Objective(replace(usual, ttft_s=3 * ttft_s(90), tpot_s=2 * tpot_s(90)), lanes)),
        ("another class", Objective(Slo(ttft_s(50), 3 * tpot_s(90), percentile=50), lanes)),
        ("lane bounds", Objective(usual, lanes, ShareBounds(0.6, 0.9))),
        ("another mode", Objective(usual, ExecutionMode.CHUNKED_PREFILL)),
        ("out of reach", Objective(replace(usual, tpot_s=0.2 * min(each.tpot_s for each in before)), lanes)),
    ]


def _targets(slo: Slo) -> Targets:
    return Targets(slo.ttft_s, slo.ttft_per_1k_input_tokens_s, slo.tpot_s, slo.percentile, slo.max_token_gap_s)


def _status(slo: Slo, measured: list[Timeline]) -> Status:
    """As the operator would have it of such a service."""
    return {
        "ttft": format_duration(percentile([each.ttft_s for each in measured], slo.percentile)),
        "tpot": format_duration(percentile([each.tpot_s for each in measured], slo.percentile)),
        "attainment": 100 * sum(each.meets(slo) for each in measured) // len(measured),
        "effectiveSLO": _targets(slo).shown(),
    }


def _told(name: str, objective: Objective, found: Forecast, prediction: Prediction, measured: list[Timeline]) -> Tried:
    slo = objective.slo
    return Tried(
        name,
        objective,
        found,
        prediction,
        100 * sum(each.meets(slo) for each in measured) / len(measured),
        percentile([each.ttft_s for each in measured], slo.percentile),
        percentile([each.tpot_s for each in measured], slo.percentile),
        len(measured),
    )


async def _load(args: argparse.Namespace, url: str, number: int) -> list[Timeline]:
    """Those of more than one token, since one has no TPOT to be late by. Raises SystemExit on a failed request."""
    seed = args.seed + number
    traffic = poisson(chats_and_documents(args.chats, args.documents), 60 * args.minutes, seed)
    run = await generate(url, NAME, traffic, seed=seed)
    timelines = [timeline for each in run.outcomes if (timeline := each.timeline()) is not None]
    if len(timelines) < len(run.outcomes):
        raise SystemExit(f"{len(run.outcomes) - len(timelines)} requests failed")
    return timelines


async def _workload(control: EngineControl) -> Workload:
    """As the engine tells it at this moment."""
    async with asyncio.timeout(60):
        async for status in control.statuses(1.0):
            if status.state == EngineStatus.READY and status.HasField("workload"):
                return workload_from_wire(status.workload)
    raise AssertionError("statuses end only by the time limit")


@asynccontextmanager
async def _engine(model: str, objective: Objective) -> AsyncIterator[tuple[str, EngineControl]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tidelane-dryrun-") as folder:
        control = Path(folder) / "control"
        words = [
            *("--model", model, "--served-name", NAME, "--port", str(port), "--kv-pool-memory", str(POOL_BYTES)),
            *("--control-socket", str(control), "--log-level", "warning"),
            *("--objective", json_format.MessageToJson(objective_to_wire(objective))),
        ]
        with subprocess.Popen(tidelane("serve", *words)) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                await until_ready(url, process.poll)
                async with EngineControl(control) as channel:
                    yield url, channel
            finally:
                process.terminate()


def _show(tried: list[Tried]) -> None:
    table = Table(title="What was predicted, and what came", title_justify="left")
    table.add_column("change", no_wrap=True)
    for name in ("wanted", "simulated", "believed", "measured", "off", "TTFT", "TPOT", "verdict", "requests"):
        table.add_column(name, justify="right")
    for each in tried:
        predicted = each.forecast
        table.add_row(
            each.name,
            f"{each.objective.slo.percentile} %",
            f"{predicted.attainment} %",
            "yes" if each.believed else "no",
            f"{each.attainment:.0f} %",
            f"{each.off:+.0f}",
            _both(predicted.ttft_s, each.ttft_s),
            _both(predicted.tpot_s, each.tpot_s),
            f"{each.prediction.outlook}{', wrong' if each.verdict_wrong else ''}",
            str(each.requests),
        )
    Console().print(table)
    Console().print("Latencies are at the percentile wanted: simulated, and measured.", highlight=False)


def _both(predicted_s: float | None, measured_s: float) -> str:
    first = "-" if predicted_s is None else f"{1000 * predicted_s:.0f}"
    return f"{first}, {1000 * measured_s:.0f} ms"


if __name__ == "__main__":
    sys.exit(refusing(main))
