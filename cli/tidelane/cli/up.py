"""`tidelane up`: the operator's core, an agent and engines on this machine, without a cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from tidelane.cli.local_agent import AgentEnded, LocalAgent, LocalAgentSettings
from tidelane.cli.manifest_files import Key, ManifestFiles, Scan
from tidelane.cli.numbers import count_from_1, seconds
from tidelane.cli.up_display import Display
from tidelane.operator.agents import plain_channel
from tidelane.operator.control import Control
from tidelane.operator.crd import KIND
from tidelane.operator.errors import Retry
from tidelane.operator.local_cluster import LocalCluster
from tidelane.operator.manifests import Document
from tidelane.operator.observation import Timing
from tidelane.operator.resources import ObjectRef
from tidelane.operator.validation import Schemas

_DESCRIPTION = """Serves what manifests declare, on this machine and without a cluster. A changed file is applied, a
removed one drained. Ctrl-C drains and stops; a second Ctrl-C does not wait for requests."""
_POLL_S: Final = 0.5
_KILL_WAIT_S: Final = 15.0
# For what is wanted and the first lines of the logs: without it nothing can be started or removed.
_ROOM_BYTES: Final = 1 << 20


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("up", help="serve what manifests declare, on this machine", description=_DESCRIPTION)
    add = parser.add_argument
    add("-f", "--filename", type=Path, required=True, metavar="FILE|DIR", help="manifest, or a folder of them")
    add(
        "--cpu-slots",
        type=count_from_1,
        metavar="N",
        help="replicas that can share the CPU (as many as are declared at first)",
    )
    add("--model-store", type=Path, metavar="DIR", help="where models are kept")
    add(
        "--drain", type=seconds, default=30.0, metavar="S", help="how long requests may finish at the end (%(default)s)"
    )
    add("--state-dir", type=Path, metavar="DIR", help="keep logs and state here (a folder that is removed at the end)")
    add("--status-file", type=Path, metavar="FILE", help="keep the services' status there as JSON, for scripts")
    add("--engine-command", metavar="COMMAND", help="launcher that takes the flags of `tidelane serve`")
    add("--log-level", default="error", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    files = ManifestFiles(args.filename, Schemas())
    scan = files.scan()
    for error in scan.errors:
        print(error, file=sys.stderr)
    if not scan.errors and not scan.documents:
        print(f"{args.filename}: {'no manifest in it' if args.filename.exists() else 'no such file'}", file=sys.stderr)
    if scan.errors or not scan.documents:
        return 2
    display = Display(Console(), args.status_file)
    try:
        _begin(display, args.status_file)
        with tempfile.TemporaryDirectory(prefix="tidelane-up-") as scratch:
            folder = (args.state_dir or Path(scratch) / "agent").absolute()
            with _held(folder):
                agent = LocalAgent(_agent_settings(args, folder, Path(scratch), scan))
                asyncio.run(Up(files, agent, display, Timing(drain_s=args.drain)).run(scan))
    except (AgentEnded, CannotUse) as error:
        print(f"tidelane up: {error}", file=sys.stderr)
        return 2 if isinstance(error, CannotUse) else 1
    return 0


class CannotUse(Exception):
    """A file or folder that was given cannot be used; the text says why and what to change."""


def _begin(display: Display, status_file: Path | None) -> None:
    try:
        display.begin()
    except OSError as error:
        why = f"{error.strerror}; it must be a file to write, in a folder that is there"
        raise CannotUse(f"--status-file {status_file}: {why}") from error


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The state folder, made if need be, for this run alone."""
    from tidelane.agent.file_lock import FileLock, Held

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(folder / "up.lock")
    except OSError as error:
        why = f"{error.strerror}; it must be a folder to write to, with room left"
        raise CannotUse(f"--state-dir {folder}: {why}") from error
    except Held as error:
        raise CannotUse(f"--state-dir {folder}: {error}; end that first, or give another --state-dir") from error
    with lock:
        if (free := shutil.disk_usage(folder).free) < _ROOM_BYTES:
            needed = f"{_ROOM_BYTES >> 10} KiB are needed; make room, or give another --state-dir"
            raise CannotUse(f"--state-dir {folder}: {free >> 10} KiB are free there and {needed}")
        yield


def _agent_settings(args: argparse.Namespace, folder: Path, scratch: Path, scan: Scan) -> LocalAgentSettings:
    services = [document for document in scan.documents.values() if document.kind == KIND]
    slots = args.cpu_slots or max(1, sum(map(_replicas, services)))
    arguments = ["--cpu-slots", str(slots)]
    if args.model_store:
        arguments += ["--model-store", str(args.model_store)]
    if args.engine_command:
        arguments += ["--engine-command", args.engine_command]
    return LocalAgentSettings(scratch, folder, args.drain, tuple(arguments))


def _replicas(document: Document) -> int:
    spec = document.manifest["spec"]
    replicas: int = spec["scaling"]["max"] if "scaling" in spec else spec.get("replicas", 1)
    return replicas


class Up:
    """One run, from the first scan of the files to the end of the last engine."""

    def __init__(self, files: ManifestFiles, agent: LocalAgent, display: Display, timing: Timing) -> None:
        self._files = files
        self._agent = agent
        self._display = display
        self._cluster = LocalCluster(
            lambda: datetime.now(UTC), self._object_changed, display.report, self._policies_changed
        )
        self._control = Control(self._cluster, plain_channel, timing)
        self._declared: set[Key] = set()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, scan: Scan) -> None:
        """Until a signal says stop."""
        with self._signals():
            supervising = asyncio.create_task(self._agent.run())
            try:
                if await self._listening(supervising):
                    await self._control.start([self._agent.target])
                    showing = asyncio.create_task(self._show())
                    self._apply(scan)
                    await self._follow_files(supervising)
                    self._display.say("draining; Ctrl-C again to stop at once")
                    await self._drain()
                    showing.cancel()
            finally:
                supervising.cancel()
                await self._agent.stop()
                await self._control.stop()
                self._display.close()

    async def _listening(self, supervising: asyncio.Task[None]) -> bool:
        """Whether the agent came up before a signal said stop. Raises AgentEnded."""
        listening = asyncio.create_task(self._agent.listening())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((listening, stopping, supervising), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if supervising.done():
            listening.cancel()
            supervising.result()
        if not listening.done():
            listening.cancel()
            return False
        return True

    async def _follow_files(self, supervising: asyncio.Task[None]) -> None:
        while not await _happens(self._stop, _POLL_S):
            if supervising.done():
                supervising.result()
            scan = self._files.scan()
            for error in scan.errors:
                self._display.say(f"not applied:\n{error}")
            self._apply(scan)

    def _apply(self, scan: Scan) -> None:
        for kind, ref in self._declared - scan.documents.keys():
            self._cluster.delete(ref, kind)
        for document in scan.documents.values():
            self._cluster.put(document.manifest)
        self._declared = set(scan.documents)

    async def _drain(self) -> None:
        for service in await self._cluster.services():
            self._cluster.delete(ObjectRef.of(service))
        while await self._cluster.services():
            if await _happens(self._hurry, _POLL_S / 5):
                self._display.say("stopping at once")
                await self._stop_replicas()
                return

    async def _stop_replicas(self) -> None:
        """Without waiting for their requests."""
        for node in self._control.agents.nodes().values():
            for ref in node.replicas:
                with contextlib.suppress(Retry):
                    await self._control.agents.remove(node.name, ref, drain_deadline_s=0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WAIT_S):
                while any(node.replicas for node in self._control.agents.nodes().values()):
                    await asyncio.sleep(_POLL_S / 5)

    async def _show(self) -> None:
        while True:
            self._changed.clear()
            self._display.update(await self._cluster.services(), await self._cluster.policies())
            await self._changed.wait()

    def _object_changed(self, ref: ObjectRef) -> None:
        self._control.object_changed(ref)
        self._changed.set()

    def _policies_changed(self) -> None:
        self._control.policies_changed()
        self._changed.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._asked_to_stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _asked_to_stop(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
