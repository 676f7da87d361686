#!/usr/bin/env python3
"""`make demo`: serve examples/chat.yaml on this machine, ask it something, send it traffic, show what came of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console

from tidelane.cli.interrupts import run_interruptible
from tidelane.engine.bench.client import sse_data
from tidelane.engine.bench.exposition import Exposition, LaneUse, read_metrics
from tidelane.engine.bench.http_stream import Target, exchange
from tidelane.engine.bench.load import generate
from tidelane.engine.bench.meter import LoadMeter, Meter
from tidelane.engine.bench.report import Report, summarise
from tidelane.engine.bench.tables import duration, lane_table, latency_table, notes
from tidelane.engine.bench.traffic import Kind, poisson
from tidelane.engine.errors import CannotServe
from tidelane.engine.model.store import default_store, resolve

ROOT: Final = Path(__file__).resolve().parent.parent
QUESTION: Final = "What is the capital of France?"
# About what two cores can carry: chats that keep coming, and now and then a long prompt to be prefilled beside them.
TRAFFIC: Final = (Kind("chat", 0.8, (10, 40), (16, 32)), Kind("long", 0.1, (300, 600), (8, 16)))
READY_S: Final = 300.0
STOP_S: Final = 60.0
TAIL_LINES: Final = 15


class DemoFailed(Exception):
    """The message is all that the person needs to see."""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    url: str
    percentile: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "chat.yaml", metavar="FILE")
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="how long to send traffic (%(default)s)"
    )
    args = parser.parse_args()
    console = Console(highlight=False)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # SIGINT too: it is ignored in a job that a script put in the background
        signal.signal(number, signal.default_int_handler)
    try:
        _run(console, args.manifest, args.seconds)
    except DemoFailed as error:
        console.print(f"The demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; everything is stopped.")
        return 130
    return 0


def _run(console: Console, manifest: Path, seconds: float) -> None:
    _pull(console, manifest)
    with _up(console, manifest) as service:
        console.rule(f"{service.name} is ready at {service.url}")
        try:
            run_interruptible(_ask(console, service))
            report, use = run_interruptible(_traffic(console, service, seconds))
        except OSError as error:
            raise DemoFailed(f"{service.url}: {error}") from error
        _show(console, report, use)
    failed = report.total.requests - report.total.completed
    if failed:
        raise DemoFailed(f"{failed} of {report.total.requests} requests failed")
    console.print("Stopped, with nothing left running.")


def _pull(console: Console, manifest: Path) -> None:
    source = yaml.safe_load(manifest.read_text(encoding="utf-8"))["spec"]["model"]["source"]
    with Meter(console, f"Looking for {source}") as meter:
        try:
            resolve(source, default_store(), meter.tell)
        except (CannotServe, ConnectionError) as error:
            raise DemoFailed(str(error)) from error


@contextmanager
def _up(console: Console, manifest: Path) -> Iterator[Service]:
    """`tidelane up`, from Ready to its clean end. Raises DemoFailed if either does not come."""
    with tempfile.TemporaryDirectory(prefix="tidelane-demo-") as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "tidelane.cli.main", "up", "-f", str(manifest), "--drain", "10"]
        command += ["--status-file", str(folder / "status.json"), "--state-dir", str(folder / "state")]
        with (folder / "up.log").open("wb") as log:
            # A process group of its own: Ctrl-C reaches it once, through us.
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            yield _ready(console, process, folder)
        finally:
            _stop(console, process, folder)


def _ready(console: Console, process: subprocess.Popen[bytes], folder: Path) -> Service:
    give_up_s = time.monotonic() + READY_S
    with Meter(console, "Starting the service") as meter:
        while time.monotonic() < give_up_s:
            service = _first_service(folder / "status.json")
            if process.poll() is not None:
                raise DemoFailed(f"`tidelane up` ended with code {process.returncode}{_tails(folder)}")
            if service is not None and service["ready"] and service["endpoint"]:
                percentile = service["status"]["effectiveSLO"]["percentile"]
                return Service(service["name"], service["endpoint"].removesuffix("/v1"), percentile)
            if service is not None and service["stalled"]:
                raise DemoFailed(f"{service['reason']}: {service['message']}{_tails(folder)}")
            if service is not None:
                meter.tell(f"{service['name']}: {service['reason']} {service['message']}")
            time.sleep(0.2)
    raise DemoFailed(f"the service was not ready within {READY_S:g} s{_tails(folder)}")


def _first_service(status_file: Path) -> dict[str, Any] | None:
    if not status_file.exists():
        return None
    services = json.loads(status_file.read_text(encoding="utf-8"))["services"]
    return services[0] if services else None


def _tails(folder: Path) -> str:
    """The last lines of every log, for a message."""
    logs = [folder / "up.log", *sorted((folder / "state").glob("**/*.log"))]
    parts = []
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
        if lines:
            parts.append("\n".join((f"\n--- {log.name}", *lines)))
    return "".join(parts)


def _stop(console: Console, process: subprocess.Popen[bytes], folder: Path) -> None:
    with Meter(console, "Stopping"):
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise DemoFailed(f"`tidelane up` did not stop within {STOP_S:g} s{_tails(folder)}") from None
    # When the demo is failing already, that `up` ended badly is known and said.
    if code and sys.exc_info()[0] is None:
        raise DemoFailed(f"`tidelane up` ended with code {code}{_tails(folder)}")


async def _ask(console: Console, service: Service) -> None:
    """Show the answer as it comes."""
    console.print(f"> {QUESTION}")
    body = {
        "model": service.name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }
    start_s = time.monotonic()
    first_s = None
    async with exchange(Target.parse(service.url), "POST", "/v1/chat/completions", json.dumps(body).encode()) as answer:
        if answer.status != 200:
            raise DemoFailed(f"the service answered {answer.status}: {(await answer.body()).decode()}")
        async for data in sse_data(answer):
            event = {"choices": []} if data == b"[DONE]" else json.loads(data)
            if "error" in event:
                raise DemoFailed(f"the answer broke off: {event['error']}")
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text and first_s is None:
                    first_s = time.monotonic() - start_s
                print(text, end="", flush=True)
    print()
    if first_s is not None:
        console.print(
            f"  (first token after {duration(first_s)}, whole answer {duration(time.monotonic() - start_s)})\n"
        )


async def _traffic(console: Console, service: Service, seconds: float) -> tuple[Report, LaneUse]:
    traffic = poisson(TRAFFIC, seconds, seed=7)
    before = await read_metrics(service.url)
    with LoadMeter(console, len(traffic.arrivals)) as meter:
        run = await generate(service.url, service.name, traffic, tell=meter.follow)
    after = await _settled(service.url)
    slo = after.slo(service.percentile)
    return summarise(run, traffic.duration_s, slo), LaneUse.between(before, after)


async def _settled(url: str) -> Exposition:
    """The engine tells its figures a few times a second: the first reading that has seen the last request end."""
    while (reading := await read_metrics(url)).value("num_requests_running"):
        await asyncio.sleep(0.1)
    return reading


def _show(console: Console, report: Report, use: LaneUse) -> None:
    console.print(latency_table(report, "Short chats beside long prompts (the targets are for two CPU cores)"))
    for line in notes(report):
        console.print(line, markup=False)
    console.print()
    console.print(lane_table(use, "What the lanes did meanwhile"))


if __name__ == "__main__":
    sys.exit(main())
