"""What Argo CD, with our health check, and kstatus, which Flux asks, say of objects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parents[2]
_BUILD = _REPOSITORY / "tools" / "kube" / "build.py"
CHECK = _REPOSITORY / "examples" / "gitops" / "argocd" / "health" / "health.lua"


@dataclass(frozen=True, slots=True)
class Health:
    argo: str
    kstatus: str
    message: str = ""


def health_of(objects: Sequence[dict[str, Any]]) -> list[Health]:
    """By gopher-lua, which Argo CD runs its checks with, and kstatus itself."""
    built = subprocess.run([sys.executable, _BUILD, "gitops-health"], stdout=subprocess.PIPE, text=True, check=True)
    program = Path(built.stdout.strip()) / "gitops-health"
    asked = subprocess.run(
        [program, CHECK], input=json.dumps(objects), capture_output=True, text=True, timeout=30, check=False
    )
    if asked.returncode != 0:
        raise AssertionError(asked.stderr)
    return [
        Health(each["argo"]["status"], each["kstatus"], each["argo"]["message"]) for each in json.loads(asked.stdout)
    ]
