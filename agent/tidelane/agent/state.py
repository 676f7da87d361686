"""The state folder: what the agent was asked to run and what it started, so that it can go on after a restart.

    lock                     held while an agent lives, with its process id
    state.json               what is wanted: one record per replica
    engines/KEY/launch.json  what was last started for one replica, with the process's identity
    engines/KEY/control      the engine's control socket; engine.log and engine.log.1 beside it

Every file is replaced as a whole: written beside, synced, renamed, its folder synced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import json_format

from tidelane.agent.claims import Claim, Slot
from tidelane.agent.engine_process import ProcessIdentity
from tidelane.agent.errors import CannotStart
from tidelane.agent.file_lock import FileLock, Held
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.wire import ReplicaRef, ReplicaSpec, spec_from_wire, spec_to_wire

log = logging.getLogger(__name__)

VERSION = 1
# sun_path has 108 bytes with the final zero; what follows the state folder takes 29.
_LONGEST_FOLDER = 107 - len("/engines/0123456789ab/control")
_LOG_LIMIT_BYTES = 16 << 20
_LOG_KEPT_BYTES = 4 << 20

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Record:
    """One replica that is wanted. `remove_by_unix_s`: it is being removed, and drains until then."""

    spec: ReplicaSpec
    claim: Claim
    remove_by_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """What was last started for a replica. `process` None: not started yet, or known to have ended.

    `ready_since_unix_s` None: not seen ready.
    """

    spec: ReplicaSpec
    claim: Claim
    port: int
    process: ProcessIdentity | None = None
    ready_since_unix_s: float | None = None


class Damaged(Exception):
    """A file's content is not what this program writes."""


class ReplicaFolder:
    """One replica's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control_socket = path / "control"
        self.log_file = path / "engine.log"
        self.kv = path / "kv"  # of the engine, which finds it again when it is started again
        self._launch_file = path / "launch.json"

    def prepare(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget_kv(self) -> None:
        """No engine has it, and none will want it."""
        shutil.rmtree(self.kv, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def read_launched(self) -> Launched | None:
        """Raises Damaged."""
        try:
            document = json.loads(self._launch_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise Damaged(str(error)) from error
        return _parse(_launched_from_json, document)

    def write_launched(self, launched: Launched) -> None:
        document: dict[str, Any] = {
            "version": VERSION,
            "spec": _spec_to_json(launched.spec),
            "claim": _claim_to_json(launched.claim),
            "port": launched.port,
            "readySinceUnixS": launched.ready_since_unix_s,
        }
        if process := launched.process:
            document["process"] = {
                "pid": process.pid,
                "startTicks": process.start_ticks,
                "bootId": process.boot_id,
            }
        _replace_file(self._launch_file, document)

    def bound_log(self) -> None:
        """Keeps the log's end as `engine.log.1` and empties it once it is too long; the engine writes on meanwhile."""
        try:
            if self.log_file.stat().st_size <= _LOG_LIMIT_BYTES:
                return
        except FileNotFoundError:
            return
        kept = self.path / "engine.log.1"
        with self.log_file.open("rb+") as file:
            file.seek(-_LOG_KEPT_BYTES, os.SEEK_END)
            try:
                kept.write_bytes(file.read())
            except OSError:
                # A full disk is the more reason to cut.
                kept.unlink(missing_ok=True)
            # The engine's descriptor appends, so its next line goes to the new end.
            file.truncate(0)

    def last_words(self) -> str:
        """The log's last line, which tells why an engine ended; empty if there is none."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, self.log_file.stat().st_size - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        return lines[-1].strip()[:500] if lines else ""


class StateFolder:
    """The whole folder, locked from construction until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises CannotStart when another agent has it, or it cannot be used."""
        path = path.resolve()  # Engines carry it in their environment: it must be the same by every way.
        if len(os.fsencode(path)) > _LONGEST_FOLDER:
            raise CannotStart(
                f"state folder {path}: its path must have at most {_LONGEST_FOLDER} bytes; give a shorter --state-dir"
            )
        try:
            (path / "engines").mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = FileLock(path / "lock")
        except OSError as error:
            raise CannotStart(
                f"state folder {path}: {error.strerror}; it must be a folder to write to, with room left"
            ) from error
        except Held as error:
            raise CannotStart(f"state folder {path}: {error}; end that first, or give another --state-dir") from error
        self.path = path
        self._state_file = path / "state.json"

    def close(self) -> None:
        self._lock.close()

    def folder(self, ref: ReplicaRef) -> ReplicaFolder:
        identity = "\0".join((ref.namespace, ref.service, ref.service_uid, str(ref.index)))
        return ReplicaFolder(self.path / "engines" / hashlib.sha256(identity.encode()).hexdigest()[:12])

    def folders(self) -> Iterable[ReplicaFolder]:
        return [ReplicaFolder(path) for path in sorted((self.path / "engines").iterdir()) if path.is_dir()]

    def save(self, records: Iterable[Record]) -> None:
        """Raises OSError; what was saved before is then still whole."""
        _replace_file(self._state_file, {"version": VERSION, "replicas": [_record_to_json(r) for r in records]})

    def load(self, now_unix_s: float) -> list[Record]:
        """What is wanted. Records that cannot be read are made again from what was started.

        A running engine's claim must never be forgotten, or a second one would be given its device. So a damaged file
        is moved aside, and every replica with a `launch.json` counts as wanted until its owner says otherwise.
        """
        try:
            document = json.loads(self._state_file.read_bytes())
            return _parse(_records_from_json, document)
        except FileNotFoundError:
            return self._from_launches() if any(True for _ in self.folders()) else []
        except (Damaged, ValueError) as error:
            aside = self._state_file.with_name(f"state.json.damaged-{int(now_unix_s)}")
            self._state_file.rename(aside)
            log.error("state file damaged, moved aside; going on from what was started file=%s why=%s", aside, error)
            records = self._from_launches()
            self.save(records)
            return records

    def _from_launches(self) -> list[Record]:
        records = []
        for folder in self.folders():
            try:
                if launched := folder.read_launched():
                    records.append(Record(launched.spec, launched.claim))
            except Damaged as error:
                log.error("launch file damaged, its engine will be ended folder=%s why=%s", folder.path, error)
        return records


def _replace_file(path: Path, document: Mapping[str, Any]) -> None:
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(make: Callable[[Any], Parsed], document: Any) -> Parsed:
    """`make(document)`, with whatever a foreign document makes it raise as Damaged. A newer version is no damage."""
    try:
        version = document["version"]
    except (TypeError, KeyError) as error:
        raise Damaged("no version") from error
    if isinstance(version, int) and version > VERSION:
        raise CannotStart(f"state version {version} is of a newer agent; this one knows {VERSION}")
    try:
        return make(document)
    except (TypeError, KeyError, ValueError, AttributeError, json_format.ParseError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _records_from_json(document: Any) -> list[Record]:
    return [
        Record(_spec_from_json(entry["spec"]), _claim_from_json(entry["claim"]), entry["removeByUnixS"])
        for entry in document["replicas"]
    ]


def _record_to_json(record: Record) -> dict[str, Any]:
    return {
        "spec": _spec_to_json(record.spec),
        "claim": _claim_to_json(record.claim),
        "removeByUnixS": record.remove_by_unix_s,
    }


def _launched_from_json(document: Any) -> Launched:
    process = document.get("process")
    return Launched(
        _spec_from_json(document["spec"]),
        _claim_from_json(document["claim"]),
        int(document["port"]),
        ProcessIdentity(process["pid"], process["startTicks"], process["bootId"]) if process else None,
        document["readySinceUnixS"],
    )


def _spec_to_json(spec: ReplicaSpec) -> dict[str, Any]:
    return json_format.MessageToDict(spec_to_wire(spec))


def _spec_from_json(document: Any) -> ReplicaSpec:
    # An unknown field comes from a newer agent; what is known of the replica still holds.
    message = json_format.ParseDict(document, node_agent_pb2.ReplicaSpec(), ignore_unknown_fields=True)
    return spec_from_wire(message)


def _claim_to_json(claim: Claim) -> dict[str, Any]:
    return {
        "slots": [{"device": slot.device_id, "index": slot.index} for slot in claim.slots],
        "bytesPerSlot": claim.bytes_per_slot,
    }


def _claim_from_json(document: Any) -> Claim:
    slots = tuple(Slot(str(slot["device"]), int(slot["index"])) for slot in document["slots"])
    return Claim(slots, int(document["bytesPerSlot"]))
