"""The harness itself: that the server is a real one, and that nothing outlives it."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.harness import Binaries, Cluster, KubectlError
from cluster.processes import ProgramError

TESTS = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LANES = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: lanes.harness.tidelane.dev}
spec:
  group: harness.tidelane.dev
  scope: Namespaced
  names: {plural: lanes, singular: lane, kind: Lane}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [min, max]
            properties:
              min: {type: integer}
              max: {type: integer}
            x-kubernetes-validations:
            - rule: self.min <= self.max
              message: min must not exceed max
"""


def lane(name: str, minimum: int, maximum: int) -> str:
    return json.dumps(
        {
            "apiVersion": "harness.tidelane.dev/v1",
            "kind": "Lane",
            "metadata": {"name": name},
            "spec": {"min": minimum, "max": maximum},
        }
    )


def config_map(name: str, **metadata: Any) -> str:
    return json.dumps(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **metadata}, "data": {"k": "v"}}
    )


def eventually(holds: Callable[[], bool], *, within_s: float = 30) -> bool:
    give_up_at_s = time.monotonic() + within_s
    while not (held := holds()) and time.monotonic() < give_up_at_s:
        time.sleep(0.05)
    return held


def config_maps(cluster: Cluster, namespace: str) -> set[str]:
    items = cluster.get(f"/api/v1/namespaces/{namespace}/configmaps")["items"]
    return {item["metadata"]["name"] for item in items}


def lives(pid: int) -> bool:
    """Whether the process runs; one that ended and that nobody waited for has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def test_server_and_client_are_of_the_version_that_was_asked_for(cluster: Cluster) -> None:
    version = cluster.get("/version")["gitVersion"]
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    assert (major, minor) >= (1, 34)
    client = json.loads(cluster.kubectl("version", "--client", "-o", "json"))
    assert client["clientVersion"]["gitVersion"].startswith("v1.")


def test_a_cel_rule_of_a_custom_resource_is_enforced(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=LANES)
    cluster.kubectl("wait", "--for=condition=Established", "crd/lanes.harness.tidelane.dev")
    cluster.kubectl("apply", "-f", "-", namespace=namespace, stdin=lane("good", 1, 2))
    with pytest.raises(KubectlError, match="min must not exceed max"):
        cluster.kubectl("apply", "-f", "-", namespace=namespace, stdin=lane("bad", 2, 1))
    names = cluster.kubectl("get", "lanes", "-o", "name", namespace=namespace).split()
    assert names == ["lane.harness.tidelane.dev/good"]


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_has_a_namespace_of_its_own(cluster: Cluster, namespace: str, turn: int) -> None:
    assert config_maps(cluster, namespace) == set()
    cluster.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("same-name"))
    assert config_maps(cluster, namespace) == {"same-name"}
    assert "same-name" not in config_maps(cluster, "default")


def test_a_restart_keeps_the_address_and_the_objects(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("kept"))
    path = f"/api/v1/namespaces/{namespace}/configmaps/kept"
    server, pids, before = cluster.server, cluster.pids, cluster.get(path)

    cluster.restart_api_server()

    assert cluster.server == server
    assert cluster.get(path) == before
    assert cluster.pids["kube-apiserver"] != pids["kube-apiserver"]
    assert cluster.pids["etcd"] == pids["etcd"]
    assert not lives(pids["kube-apiserver"])


def test_a_restart_ends_running_watches(cluster: Cluster, binaries: Binaries, namespace: str) -> None:
    watch = ["get", "configmaps", "--watch", "--output=name", "--namespace", namespace]
    command = [str(binaries.kubectl), "--kubeconfig", str(cluster.kubeconfig), *watch]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        cluster.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("seen"))
        assert watching.stdout is not None
        assert watching.stdout.readline() == "configmap/seen\n"
        cluster.restart_api_server()
        assert watching.wait(timeout=30) == 0


def test_an_owner_takes_its_dependents_along_even_after_a_restart(controllers: Cluster, namespace: str) -> None:
    controllers.restart_api_server()
    controllers.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("owner"))
    uid = controllers.get(f"/api/v1/namespaces/{namespace}/configmaps/owner")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    owned = config_map("owned", ownerReferences=[owner])
    controllers.kubectl("create", "-f", "-", namespace=namespace, stdin=owned)
    controllers.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("free"))

    controllers.kubectl("delete", "configmap", "owner", namespace=namespace)

    assert eventually(lambda: "owned" not in config_maps(controllers, namespace))
    assert "free" in config_maps(controllers, namespace)


def test_a_deleted_namespace_goes_with_the_controllers(controllers: Cluster) -> None:
    controllers.kubectl("create", "namespace", "short-lived")
    controllers.kubectl("create", "-f", "-", namespace="short-lived", stdin=config_map("inside"))
    controllers.kubectl("delete", "namespace", "short-lived", "--wait=true")
    names = controllers.kubectl("get", "namespaces", "-o", "name").split()
    assert "namespace/short-lived" not in names
    assert "namespace/default" in names


def test_writes_are_counted_by_who_made_them(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("counted"))
    cluster.kubectl("get", "configmap", "counted", namespace=namespace)
    cluster.kubectl("label", "configmap", "counted", "colour=blue", namespace=namespace)
    with pytest.raises(KubectlError, match="already exists"):
        cluster.kubectl("create", "-f", "-", namespace=namespace, stdin=config_map("counted"))

    here = [write for write in cluster.writes() if write.namespace == namespace]

    mine = [write for write in here if write.user_agent.startswith("kubectl/")]
    of_config_maps = [write for write in mine if write.resource == "configmaps"]
    assert [write.verb for write in of_config_maps] == ["create", "patch", "create"]
    assert of_config_maps[1].name == "counted"


def test_two_clusters_at_once_keep_apart_and_leave_nothing(
    cluster: Cluster, binaries: Binaries, namespace: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path / "second", binaries) as second:
        assert second.server != cluster.server
        assert f"namespace/{namespace}" not in second.kubectl("get", "namespaces", "-o", "name").split()
        pids = second.pids
        assert pids.keys() == {"etcd", "kube-apiserver"}
        assert all(lives(pid) for pid in pids.values())
    assert not any(lives(pid) for pid in pids.values())
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_half_way_says_why_and_leaves_nothing(binaries: Binaries, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 3\n")
    broken.chmod(0o755)
    cluster = Cluster(tmp_path / "cluster", dataclasses.replace(binaries, kube_apiserver=broken))
    with pytest.raises(ProgramError, match=r"kube-apiserver ended with 3(?s:.*)no such flag"):
        cluster.start()
    assert cluster.pids == {}
    assert list(tmp_path.iterdir()) == [broken]


def test_stopping_can_keep_the_logs(binaries: Binaries, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", binaries)
    cluster.start()
    cluster.stop(keep_logs=True)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"cluster/logs/etcd.log", "cluster/logs/kube-apiserver.log"} <= kept
    assert not any(path.endswith((".key", "kubeconfig")) for path in kept)


RUN = """
import signal, sys
from pathlib import Path
from cluster.harness import Binaries, Cluster, sigterm_as_interrupt
# A test run in the background of a script has SIGINT ignored, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
with sigterm_as_interrupt(), Cluster(Path(sys.argv[1]), Binaries.find()) as cluster:
    print(*cluster.pids.values(), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_run_that_is_killed(binaries: Binaries, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "cluster"
    command = [sys.executable, "-c", RUN, str(folder)]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        assert all(lives(pid) for pid in pids)
        try:
            run.send_signal(number)
            run.wait(timeout=30)
        finally:
            run.kill()
    assert eventually(lambda: not any(lives(pid) for pid in pids))
    # A run that was not given the time to clean up leaves its folder, which pytest removes later.
    assert folder.exists() == (number == signal.SIGKILL)
