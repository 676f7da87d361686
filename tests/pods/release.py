"""Tidelane on a node, by its chart, and what its steps ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.harness import KubectlError
from pods import chat_client
from pods.node import Node

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "tidelane"
EXAMPLE = REPOSITORY / "examples" / "chat.yaml"
SYSTEM = "tidelane-system"
AGENT = "app.kubernetes.io/component=agent"
OPERATOR = "app.kubernetes.io/component=operator"
PORT = 80
RUNNING = "tidelane_num_requests_running"
# The locked packages: the engine's image for these tests has none of its own.
PACKAGES = "/opt/packages"


@dataclass(frozen=True)
class Answer:
    """One request of chat_client."""

    at_s: float
    took_s: float
    tokens: int
    end: str

    @property
    def kind(self) -> str:
        return self.end.partition(":")[0]


def build_images(debian: Path) -> None:
    """dist/tidelane-operator.tar and dist/tidelane-engine-bare.tar, from this checkout."""
    environment = {
        **os.environ,
        "PATH": f"{os.environ['PATH']}:{debian}/usr/sbin",
        "DEBOOTSTRAP_DIR": str(debian / "usr/share/debootstrap"),
    }
    base = _printed("tools/images/base.sh", environment)
    for script in ("operator.sh", "engine-bare.sh"):
        _printed(f"tools/images/{script}", {**environment, "BASE": base})


def _printed(script: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run([REPOSITORY / script], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def locked_packages() -> Path:
    """Where this checkout's environment has them."""
    site = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    return Path((site / "locked-packages.pth").read_text().strip())


def values() -> list[str]:
    """Arguments of helm: the chart's defaults, but for the packages of the engine."""
    return [
        *("--set", "agent.extraVolumes[0].name=packages"),
        *("--set", f"agent.extraVolumes[0].hostPath.path={locked_packages()}"),
        *("--set", "agent.extraVolumeMounts[0].name=packages"),
        *("--set", f"agent.extraVolumeMounts[0].mountPath={PACKAGES}"),
        *("--set", "agent.extraVolumeMounts[0].readOnly=true"),
    ]


@dataclass(frozen=True)
class Release:
    node: Node

    def helm(self, *arguments: str, timeout_s: float = 300) -> str:
        return self.node.run(["helm", "--namespace", SYSTEM, *arguments], timeout_s=timeout_s)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.node.kubectl("get", *arguments, "-o", "json"))

    def pod(self, selector: str) -> dict[str, Any] | None:
        """The only pod that is not on its way out."""
        found = [
            each
            for each in self.get("pods", "-n", SYSTEM, "-l", selector)["items"]
            if "deletionTimestamp" not in each["metadata"]
        ]
        return found[0] if len(found) == 1 else None

    def is_ready(self, selector: str, *, unlike: str = "") -> bool:
        """Whether its only pod is ready, and another than the one with the uid `unlike`."""
        pod = self.pod(selector)
        if pod is None or pod["metadata"]["uid"] == unlike:
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))

    def uid(self, selector: str) -> str:
        pod = self.pod(selector)
        assert pod is not None, f"not one pod with {selector}"
        uid: str = pod["metadata"]["uid"]
        return uid

    def restarts(self, selector: str) -> int:
        """Of the containers of its only pod."""
        pod = self.pod(selector)
        assert pod is not None, f"not one pod with {selector}"
        return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])

    def targets_in_force(self, name: str) -> dict[str, Any]:
        targets: dict[str, Any] = self.get("tlsvc", name)["status"].get("effectiveSLO", {})
        return targets

    def children(self, name: str) -> list[str]:
        """Services and EndpointSlices of the InferenceService."""
        selector = f"kubernetes.io/service-name={name}"
        slices = self.node.kubectl("get", "endpointslices", "-l", selector, "-o", "name").split()
        return [*slices, *self.node.kubectl("get", "service", name, "--ignore-not-found", "-o", "name").split()]

    def left(self) -> list[str]:
        """What the chart made and is still there, kinds aside."""
        kinds = "all,secrets,serviceaccounts,networkpolicies,configmaps,roles,rolebindings,endpointslices"
        inside = self.node.kubectl("get", kinds, "-n", SYSTEM, "-o", "name").split()
        everywhere = self.node.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").split()
        return [each for each in (*inside, *everywhere) if "tidelane" in each]

    def wait_for_service(self, name: str, *, timeout_s: float = 300) -> None:
        limit = f"--timeout={timeout_s:.0f}s"
        self.node.kubectl("wait", f"tlsvc/{name}", "--for=condition=Ready", limit, timeout_s=timeout_s + 10)

    def engines(self) -> dict[str, float]:
        """Start time, as the node's kernel counts it, of each engine in the agent's pod, by its process id there."""
        script = (
            "import pathlib, json;"
            "read = lambda p: (p / 'cmdline').read_bytes().split(bytes(1));"
            "found = [p for p in pathlib.Path('/proc').glob('[0-9]*') if b'serve' in read(p)];"
            "print(json.dumps({p.name: float((p / 'stat').read_text().rsplit(')', 1)[1].split()[19]) for p in found}))"
        )
        said = self.node.kubectl("exec", "-n", SYSTEM, "ds/tidelane-agent", "--", "python3", "-c", script)
        engines: dict[str, float] = json.loads(said)
        return engines

    def start_client(self) -> None:
        """A pod of its own, from which `chats` asks."""
        image = "tidelane/engine:" + self.version
        sleep = ["--command", "--", "python3", "-c", "import signal; signal.pause()"]
        self.node.kubectl("run", "client", f"--image={image}", "--restart=Never", *sleep)
        self.node.kubectl("wait", "pod/client", "--for=condition=Ready", "--timeout=60s", timeout_s=70)

    @property
    def url(self) -> str:
        return f"http://chat.default.svc:{PORT}"

    @property
    def version(self) -> str:
        (line,) = (each for each in (CHART / "Chart.yaml").read_text().splitlines() if each.startswith("appVersion"))
        return line.split(":")[1].strip().strip('"')

    def chats(self, url: str, *, streams: int = 0, seconds: int = 0, tokens: int = 16) -> subprocess.Popen[str]:
        script = Path(chat_client.__file__).read_text()
        asked = ["python3", "-c", script, url, "chat", str(streams), str(seconds), str(tokens)]
        return self.node.popen(["kubectl", "exec", "client", "--", *asked])

    def running(self, url: str) -> int:
        """Requests that the engine computes right now, as its metrics say."""
        script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
        said = self.node.kubectl("exec", "client", "--", "python3", "-c", script, f"{url}/metrics")
        return sum(int(float(line.split()[-1])) for line in said.splitlines() if line.startswith(RUNNING))

    def chat_until_done(self, *, timeout_s: float) -> Answer:
        """The first that ends as it should, or the last within the time."""
        given_up_at_s = time.monotonic() + timeout_s
        while True:
            answer = self.chat(self.url)
            if answer.kind == "done" or time.monotonic() > given_up_at_s:
                return answer

    def chat(self, url: str, *, tokens: int = 16) -> Answer:
        (answer,) = answers(self.chats(url, tokens=tokens), timeout_s=60)
        return answer


def answers(asking: subprocess.Popen[str], *, timeout_s: float) -> list[Answer]:
    """What the clients saw, once all have ended."""
    printed, _ = asking.communicate(timeout=timeout_s)
    return [Answer(**json.loads(line)) for line in printed.splitlines()]


def ends(seen: Sequence[Answer]) -> str:
    """How many ended how, in words."""
    counted = Counter(answer.kind for answer in seen)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counted.items()))


def until(holds: Callable[[], object], what: str, *, timeout_s: float = 180) -> None:
    """Returns once it holds; kubectl failing for a moment is no end of it."""
    given_up_at_s = time.monotonic() + timeout_s
    while True:
        try:
            if holds():
                return
        except (KubectlError, subprocess.TimeoutExpired):
            pass
        if time.monotonic() > given_up_at_s:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.25)
