"""The API server with the CRD installed, and agents, operators and engines as processes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tools.kv_proof.serving import Served, free_port

from cluster.harness import Cluster, KubectlError
from tidelane.operator.kubernetes_cluster import KubernetesCluster, connect

from .operator_rig import OperatorRig
from .serving import serve_command

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The cluster with every CRD established, and served."""
    cluster.kubectl("apply", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    # Established kinds may be answered with 429 for a moment, "storage is (re)initializing"; kubectl tries again.
    cluster.kubectl("get", "inferenceservices,slopolicies,modelprofiles", "-A")
    return cluster


@pytest.fixture
def namespace(installed: Cluster, namespace: str) -> Iterator[str]:
    """A fresh namespace, whose services are gone afterwards: operators of other tests must not take them up."""
    yield namespace
    for name in installed.kubectl("get", "tlsvc", "-o", "name", namespace=namespace).split():
        with contextlib.suppress(KubectlError):
            released = '{"metadata": {"finalizers": null}}'
            installed.kubectl("patch", name, "--type=merge", "-p", released, namespace=namespace)
            installed.kubectl("delete", name, "--wait=false", namespace=namespace)


@pytest.fixture
async def kubernetes(installed: Cluster) -> AsyncIterator[KubernetesCluster]:
    async with await connect(str(installed.kubeconfig)) as client:
        yield KubernetesCluster(client)


@pytest.fixture
def rig(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[OperatorRig]:
    with OperatorRig(installed, namespace, tmp_path) as made:
        yield made


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    port = free_port()
    process = subprocess.Popen(serve_command(port, tmp_path))
    yield Served(process, port)
    process.kill()
    process.wait()
