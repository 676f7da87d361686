"""One node and one release for the whole story, and the table of its steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from cluster.harness import sigterm_as_interrupt
from pods import node_configuration
from pods.node import Node, NodePrograms
from pods.release import REPOSITORY, Release, build_images
from pods.story import Story

_STORY = pytest.StashKey[Story]()
_NODE = pytest.StashKey[Node]()


@pytest.fixture(scope="session")
def story(request: pytest.FixtureRequest) -> Story:
    story = Story()
    request.config.stash[_STORY] = story
    return story


@pytest.fixture(scope="session")
def node(story: Story, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Node]:
    """A Ready node with the images of this checkout."""
    with story.step("programs found or built"):
        programs = NodePrograms.find()
    with story.step("images built"):
        build_images(programs.debian)
    node = Node(tmp_path_factory.mktemp("pods") / "node", programs)
    with sigterm_as_interrupt():
        try:
            with story.step("control plane and containerd up"):
                node.start()
            request.config.stash[_NODE] = node
            with story.step("images imported"):
                for archive in ("tidelane-operator.tar", "tidelane-engine-bare.tar"):
                    node.import_image(REPOSITORY / "dist" / archive)
                node.import_image(pause_image(programs.paths["pod-pause"], tmp_path_factory.mktemp("pause")))
                # Pods reach no package index. This is the default of agent.modelsPath.
                node.run(["mkdir", "-p", "/var/lib/tidelane"])
                node.run(["cp", "-rL", str(Path.home() / ".local/share/tidelane/models"), "/var/lib/tidelane/models"])
            with story.step("node Ready"):
                node.join()
            yield node
        finally:
            with story.step("node gone"):
                node.stop(keep_logs=request.session.testsfailed > 0)


@pytest.fixture(scope="session")
def release(node: Node) -> Release:
    return Release(node)


def pause_image(program: Path, folder: Path) -> Path:
    """An archive with nothing but the first process of a pod."""
    (folder / "root").mkdir()
    (folder / "root" / "pause").write_bytes(program.read_bytes())
    (folder / "root" / "pause").chmod(0o755)
    archive = folder / "pause.tar"
    name = node_configuration.PAUSE_IMAGE.removeprefix("docker.io/")
    layer = f"{folder}/root=/"
    script = REPOSITORY / "tools" / "images" / "oci.py"
    command: list[str | Path] = [
        sys.executable,
        script,
        archive,
        "--name",
        name,
        "--layer",
        layer,
        "--entrypoint",
        "/pause",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return archive


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows how the logs of the node's programs end below the failure, and the state of its pods."""
    report = yield
    node = item.config.stash.get(_NODE, None)
    if report.failed and node is not None:
        for name, tail in node.log_tails().items():
            report.sections.append((f"{name} log", tail))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    story = config.stash.get(_STORY, None)
    if story is not None:
        terminalreporter.section("what was seen on the node")
        for line in story.table():
            terminalreporter.write_line(line)
