"""The plumbing of tools/gpu/check.sh, without what a bare GPU machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
# Not on such a machine; for the first two the script has stand-ins.
BARE = """
import importlib.abc, importlib.machinery, sys
STAND_INS = {folder!r}
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("msgspec", "zmq"):
            return importlib.machinery.PathFinder.find_spec(name, [STAND_INS])
        if name.split(".")[0] in ("grpc", "google", "pydantic", "starlette", "uvicorn", "prometheus_client", "kopf"):
            raise ModuleNotFoundError(name)
        return None
sys.meta_path.insert(0, Bare())
"""


@pytest.mark.slow
def test_a_dry_run_gives_a_table_and_json(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE.format(folder=str(REPOSITORY / "tools/gpu/stand_ins")))
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [str(REPOSITORY / "tools/gpu/check.sh"), "--dry-run"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    opened, *compared = checks
    assert opened["check"].endswith(": open")
    assert [check["ok"] for check in checks] == [True] * 6, done.stdout
    assert done.stdout.count("the likeliest") == 2 * len(compared)
