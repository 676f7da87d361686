"""What the live tools share: the built-in model, traffic, options, and an engine or a whole service that serves it.

Both are child processes, from ready to their clean end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from google.protobuf import json_format

from tidelane.cli.targets import BadOption
from tidelane.engine.bench.traffic import Kind
from tidelane.engine.slo import Slo
from tidelane.engine.whole_file import write_whole
from tidelane.operator.quantities import format_duration
from tidelane.rpc.wire import ExecutionMode, Objective, objective_to_wire

MODEL = "builtin://smollm2-135m-instruct"
NAME = "chat"
POOL_BYTES = 512 << 20
# Ours, and the baselines it is measured against.
COMPARED = (ExecutionMode.MIXED_BATCH, ExecutionMode.CHUNKED_PREFILL, ExecutionMode.LANES)
READY_WITHIN_S = 300.0
STOPPED_WITHIN_S = 60.0


def chats_and_documents(chats_rps: float, documents_rps: float) -> tuple[Kind, Kind]:
    """Short chats beside long prompts, so many of each a second."""
    return (
        Kind("chat", chats_rps, (20, 80), (20, 60)),
        Kind("document", documents_rps, (600, 1800), (10, 30)),
    )


def parser(description: str | None, *, slo: str) -> argparse.ArgumentParser:
    """With the options that all measurements have; `slo` is the default."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--slo", default=slo, help="targets for this machine (%(default)s)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path, help="write all figures there")
    return options


def refusing(main: Callable[[], int]) -> int:
    """`main`, whose wrong options end it with one line."""
    try:
        return main()
    except BadOption as error:
        print(error, file=sys.stderr)
        return 2


def write_measurement(path: Path, figures: dict[str, Any]) -> None:
    """`figures`, and when and with what they were measured."""
    versions = {name: importlib.metadata.version(name) for name in ("tidelane", "torch")}
    versions["python"] = platform.python_version()
    document = {"measured": datetime.now(tz=UTC).date().isoformat(), "versions": versions, **figures}
    write_whole(path, json.dumps(document, indent=1) + "\n")


def above_zero(text: str) -> float:
    """For argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def one_or_more(text: str) -> int:
    """For argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def mode(text: str, known: Sequence[ExecutionMode] = tuple(ExecutionMode)) -> ExecutionMode:
    """One of `known`, for argparse."""
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text}: choose from {', '.join(known)}")
    return ExecutionMode(text)


def modes(text: str, known: Sequence[ExecutionMode] = tuple(ExecutionMode)) -> list[ExecutionMode]:
    """`Lanes,Auto`, each one of `known`, for argparse."""
    return [mode(name, known) for name in text.split(",")]


def tidelane(command: str, *words: str) -> list[str]:
    """The command line of a subcommand, in this environment."""
    return [sys.executable, "-m", "tidelane.cli.main", command, *words]


@contextmanager
def running_engine(mode: ExecutionMode, slo: Slo) -> Iterator[str]:
    """`tidelane serve`, alone: gives the address of its server. Raises SystemExit if it does not get ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    objective = json_format.MessageToJson(objective_to_wire(Objective(slo, mode)))
    words = ("--model", MODEL, "--served-name", NAME, "--port", str(port), "--kv-pool-memory", str(POOL_BYTES))
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(tidelane("serve", *words, "--objective", objective, "--log-level", "warning")) as process:
        try:
            if _until(lambda: _answers(f"{url}/ready"), process) is None:
                raise SystemExit(f"the engine at {url} did not get ready")
            yield url
        finally:
            process.terminate()


@contextmanager
def running_service(mode: ExecutionMode, slo: Slo) -> Iterator[str]:
    """`tidelane up` on one service: gives the address of its server.

    Raises SystemExit if it does not get ready or end well.
    """
    with TemporaryDirectory(prefix="tidelane-live-") as scratch:
        folder = Path(scratch)
        (folder / "service.yaml").write_text(_manifest(mode, slo), encoding="utf-8")
        files = {"-f": "service.yaml", "--status-file": "status.json", "--state-dir": "state"}
        words = [word for option, name in files.items() for word in (option, str(folder / name))]
        command = tidelane("up", *words, "--drain", "20")
        with (folder / "up.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            url = _until(lambda: _endpoint(folder / "status.json"), process)
            if url is None:
                raise SystemExit(f"the service did not get ready: {(folder / 'up.log').read_text()[-2000:]}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOPPED_WITHIN_S)
        if code:
            raise SystemExit(f"`tidelane up` ended with code {code}: {(folder / 'up.log').read_text()[-2000:]}")


def _manifest(mode: ExecutionMode, slo: Slo) -> str:
    """An InferenceService of the built-in model with these targets."""
    targets: dict[str, Any] = {"ttft": format_duration(slo.ttft_s), "tpot": format_duration(slo.tpot_s)}
    if slo.ttft_per_1k_input_tokens_s:
        targets["ttftPer1kInputTokens"] = format_duration(slo.ttft_per_1k_input_tokens_s)
    spec = {
        "model": {"source": MODEL, "maxContextTokens": 4096},
        "slo": targets | {"percentile": 90},
        "execution": {"mode": mode.value},
        "replicas": 1,
    }
    service = {
        "apiVersion": "tidelane.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": spec,
    }
    return yaml.safe_dump(service)


def _until(ready: Callable[[], str | None], process: subprocess.Popen[bytes]) -> str | None:
    """What `ready` says once it says something; None if the process ends or READY_WITHIN_S pass before."""
    give_up_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < give_up_s and process.poll() is None:
        said = ready()
        if said is not None:
            return said
        time.sleep(0.2)  # the interval of a poll with a deadline
    return None


def _answers(url: str) -> str | None:
    """The address itself, if something there answers and says 200."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return url
    except OSError:  # of which URLError is one
        return None


def _endpoint(status: Path) -> str | None:
    services = json.loads(status.read_text(encoding="utf-8"))["services"] if status.exists() else []
    if services and services[0]["ready"] and services[0]["endpoint"]:
        return str(services[0]["endpoint"]).removesuffix("/v1")
    return None
