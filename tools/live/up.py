"""`tidelane up` on one service as a child process: from Ready to its clean end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tidelane.engine.slo import Slo
from tidelane.operator.quantities import format_duration

MODEL = "builtin://smollm2-135m-instruct"
NAME = "chat"
READY_WITHIN_S = 300.0
STOPPED_WITHIN_S = 60.0


def manifest(mode: str, slo: Slo) -> str:
    """An InferenceService of the built-in model with these targets."""
    targets: dict[str, Any] = {"ttft": format_duration(slo.ttft_s), "tpot": format_duration(slo.tpot_s)}
    if slo.ttft_per_1k_input_tokens_s:
        targets["ttftPer1kInputTokens"] = format_duration(slo.ttft_per_1k_input_tokens_s)
    spec = {
        "model": {"source": MODEL, "maxContextTokens": 4096},
        "slo": targets | {"percentile": 90},
        "execution": {"mode": mode},
        "replicas": 1,
    }
    service = {
        "apiVersion": "tidelane.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": spec,
    }
    return yaml.safe_dump(service)


@contextmanager
def serving(text: str) -> Iterator[str]:
    """Serve the manifest; gives the address of its server. Raises SystemExit if it does not get ready or end well."""
    with TemporaryDirectory(prefix="tidelane-live-") as scratch:
        folder = Path(scratch)
        (folder / "service.yaml").write_text(text, encoding="utf-8")
        files = {"-f": "service.yaml", "--status-file": "status.json", "--state-dir": "state"}
        words = [word for option, name in files.items() for word in (option, str(folder / name))]
        command = [sys.executable, "-m", "tidelane.cli.main", "up", *words, "--drain", "20"]
        with (folder / "up.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            yield _endpoint(process, folder)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOPPED_WITHIN_S)
        if code:
            raise SystemExit(f"`tidelane up` ended with code {code}: {(folder / 'up.log').read_text()[-2000:]}")


def _endpoint(process: subprocess.Popen[bytes], folder: Path) -> str:
    give_up_s = time.monotonic() + READY_WITHIN_S
    status = folder / "status.json"
    while time.monotonic() < give_up_s and process.poll() is None:
        services = json.loads(status.read_text(encoding="utf-8"))["services"] if status.exists() else []
        if services and services[0]["ready"] and services[0]["endpoint"]:
            return str(services[0]["endpoint"]).removesuffix("/v1")
        time.sleep(0.2)  # the interval of a poll with a deadline
    raise SystemExit(f"the service did not get ready: {(folder / 'up.log').read_text()[-2000:]}")
