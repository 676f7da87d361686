"""A real Kubernetes API server, one for the whole run, started when the first test needs it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from cluster.harness import Binaries, Cluster, MissingBinariesError, sigterm_as_interrupt

# No test is about time: a busy machine must not fail one.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_CLUSTER = pytest.StashKey[Cluster]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds what is missing before the first test, so that no test's time limit has to cover it."""
    if session.config.option.collectonly:
        return
    if any("binaries" in getattr(item, "fixturenames", ()) for item in session.items):
        capture = session.config.pluginmanager.getplugin("capturemanager")
        # Missing binaries fail the tests that need them, in the fixture, and no others.
        with capture.global_and_fixture_disabled(), contextlib.suppress(MissingBinariesError):
            Binaries.find()


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    return Binaries.find()


@pytest.fixture(scope="session")
def cluster(
    binaries: Binaries, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """One cluster for the whole test run; without controllers until a test asks for them."""
    cluster = Cluster(tmp_path_factory.mktemp("kubernetes") / "cluster", binaries)
    with sigterm_as_interrupt():
        cluster.start()
        request.config.stash[_CLUSTER] = cluster
        try:
            yield cluster
        finally:
            cluster.stop(keep_logs=request.session.testsfailed > 0)


@pytest.fixture
def controllers(cluster: Cluster) -> Cluster:
    """The same cluster, with its controller manager running, from then on for all tests."""
    cluster.start_controller_manager()
    return cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """The name of a fresh namespace; its deletion ends only if the controllers run."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows how the cluster's logs end below each failure of a test that used it."""
    report = yield
    cluster = item.config.stash.get(_CLUSTER, None)
    if report.failed and cluster is not None and "cluster" in getattr(item, "fixturenames", ()):
        for name, tail in cluster.log_tails().items():
            report.sections.append((f"{name} log", tail))
    return report
