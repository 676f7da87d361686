"""One real API server for the tests in this folder, with the CRD installed, and agents and operators as processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tidelane.operator.kubernetes_cluster import KubernetesCluster, connect

from ..cluster.conftest import binaries, cluster, controllers, namespace
from ..cluster.harness import Cluster
from .operator_rig import OperatorRig

__all__ = ["binaries", "cluster", "controllers", "namespace"]

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The cluster with every CRD established."""
    cluster.kubectl("apply", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    return cluster


@pytest.fixture
async def kubernetes(installed: Cluster) -> AsyncIterator[KubernetesCluster]:
    async with await connect(str(installed.kubeconfig)) as client:
        yield KubernetesCluster(client)


@pytest.fixture
def rig(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[OperatorRig]:
    with OperatorRig(installed, namespace, tmp_path) as made:
        yield made
