"""The chart, as helm renders and installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from cluster.harness import BUILD, Cluster

CHART = Path(__file__).parents[2] / "charts" / "tidelane"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
Manifest = dict[str, Any]


class HelmError(Exception):
    """helm refused or failed; the message is what it wrote to stderr."""


@dataclass(frozen=True)
class Helm:
    """`kubeconfig` None: without a cluster."""

    program: Path
    home: Path
    kubeconfig: Path | None = None

    @classmethod
    def find(cls, home: Path, kubeconfig: Path | None = None) -> Self:
        """Builds it, once, if there is none."""
        built = subprocess.run([sys.executable, BUILD, "helm"], stdout=subprocess.PIPE, text=True, check=True)
        return cls(Path(built.stdout.strip()) / "helm", home, kubeconfig)

    def __call__(self, *arguments: str) -> str:
        # It keeps its own files and, for the cluster, kubectl's below the home.
        environment = {"HOME": str(self.home)}
        if self.kubeconfig:
            environment["KUBECONFIG"] = str(self.kubeconfig)
        done = subprocess.run(
            [self.program, *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        if done.returncode != 0:
            raise HelmError(done.stderr.strip() + done.stdout.strip())
        return done.stdout

    def render(self, *arguments: str) -> list[Manifest]:
        text = self("template", "tidelane", str(CHART), "--namespace", "tidelane-system", *arguments)
        return [each for each in yaml.safe_load_all(text) if each]


def one(manifests: Sequence[Manifest], kind: str, component: str = "") -> Manifest:
    """The only manifest of that kind, or of that kind and component."""
    (found,) = (each for each in manifests if each["kind"] == kind and component in each["metadata"]["name"])
    return found


class AuditedCluster(Cluster):
    """Knows who made a request."""

    def used(self, user: str) -> Iterator[tuple[str, str, str]]:
        """API group, resource and verb of every request of that user for a resource."""
        for line in (self._programs.logs / "audit.json").read_text().splitlines():
            event = json.loads(line)
            target = event.get("objectRef")
            if event["user"]["username"] == user and target:
                resource = "/".join(filter(None, (target["resource"], target.get("subresource"))))
                yield target.get("apiGroup", ""), resource, event["verb"]
