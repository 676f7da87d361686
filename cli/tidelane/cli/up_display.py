"""What `tidelane up` shows: a line for each change that a person would want to know, and a status file for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tidelane.operator.reports import Report
from tidelane.operator.resources import Condition, ObjectRef, RawObject

_TOLD: Final = (
    "SLOMissed",
    "SLOMet",
    "SLOOutOfReach",
    "TargetsChanged",
    "KVPressure",
    "KVPressureOver",
    "Moved",
    "ScaledUp",
    "ScaledDown",
)
_QUESTION: Final = "What is the capital of France?"


class Display:
    """Prints to the console; on a terminal, a spinner tells what is being waited for."""

    def __init__(self, console: Console, status_file: Path | None) -> None:
        self._console = console
        self._status_file = status_file
        self._spinner = console.status("")
        self._shown: dict[ObjectRef, tuple[str, str]] = {}
        self._policies: dict[str, str] = {}
        self._not_written = ""

    def begin(self) -> None:
        """Writes the status file for the first time. Raises OSError when it cannot."""
        if self._status_file:
            _write(self._status_file, {"services": [], "policies": []})

    def update(self, services: Sequence[RawObject], policies: Sequence[RawObject] = ()) -> None:
        """Says what is new since the last time."""
        found = {ObjectRef.of(each): each for each in services}
        for ref in [ref for ref in self._shown if ref not in found]:
            del self._shown[ref]
            self.say(f"{ref.name}: gone")
        self._show_policies(policies)
        waits = [wait for ref, service in found.items() if (wait := self._show(ref, service))]
        self._spin(waits)
        if self._status_file:
            content = {
                "services": [_summary(ref, each) for ref, each in found.items()],
                "policies": [_policy_summary(each) for each in policies],
            }
            self._keep(self._status_file, content)

    def report(self, ref: ObjectRef, report: Report) -> None:
        """Readiness is told by `update`; this adds what it does not show."""
        if report.reason in _TOLD:
            self.say(f"{ref.name}: {report.reason}: {report.message}")

    def say(self, text: str) -> None:
        # Nothing here is markup, and a long line is there to be copied whole.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._spin(())

    def _show(self, ref: ObjectRef, service: RawObject) -> str:
        """What the service waits for; empty if it is ready or stuck."""
        ready = _condition(service, "Ready")
        if ready is None:
            return f"{ref.name}: starting"
        endpoint = service["status"].get("endpoint", "")
        now = (ready["reason"], endpoint if ready["status"] == "True" else ready["message"])
        if self._shown.get(ref) != now:
            self._shown[ref] = now
            self._announce(ref, service, ready, endpoint)
        waiting = ready["status"] != "True" and _condition(service, "Stalled") is None
        return f"{ref.name}: {ready['reason']}" if waiting else ""

    def _show_policies(self, policies: Sequence[RawObject]) -> None:
        now = {each["metadata"]["name"]: _effect(each) for each in policies if _seen(each)}
        for name in self._policies.keys() - now.keys():
            self.say(f"policy {name}: gone")
        for name, text in now.items():
            if self._policies.get(name) != text:
                self.say(f"policy {name}: {text}")
        self._policies = now

    def _announce(self, ref: ObjectRef, service: RawObject, ready: Condition, endpoint: str) -> None:
        if ready["status"] != "True":
            self.say(f"{ref.name}: {ready['reason']}: {ready['message']}")
        elif endpoint:
            self.say(f"{ref.name}: ready at {endpoint}\n  {_curl(endpoint, ref.name)}")
        else:
            self.say(f"{ref.name}: ready, with no replicas")
        ignored = _condition(service, "FieldsIgnored")
        if ignored and ready["status"] == "True":
            self.say(f"{ref.name}: {ignored['message']}")

    def _keep(self, path: Path, content: Mapping[str, Any]) -> None:
        """Services go on without the file, so a disk that fills up is told, once."""
        try:
            _write(path, content)
        except OSError as error:
            if self._not_written != (why := str(error)):
                self.say(f"status file not written: {why}")
            self._not_written = why
        else:
            self._not_written = ""

    def _spin(self, waits: Sequence[str]) -> None:
        if not waits:
            self._spinner.stop()
        else:
            self._spinner.update("; ".join(waits))
            self._spinner.start()


def _summary(ref: ObjectRef, service: RawObject) -> Mapping[str, Any]:
    ready = _condition(service, "Ready")
    return {
        "namespace": ref.namespace,
        "name": ref.name,
        "generation": service["metadata"]["generation"],
        "ready": ready is not None and ready["status"] == "True",
        "stalled": _condition(service, "Stalled") is not None,
        "reason": ready["reason"] if ready else "",
        "message": ready["message"] if ready else "",
        "endpoint": service.get("status", {}).get("endpoint"),
        "status": service.get("status", {}),
    }


def _seen(policy: RawObject) -> bool:
    """Whether its status says anything: one that nobody has looked at has observedGeneration -1 alone."""
    return "conditions" in policy.get("status", {})


def _policy_summary(policy: RawObject) -> Mapping[str, Any]:
    return {"name": policy["metadata"]["name"], "status": policy.get("status", {})}


def _effect(policy: RawObject) -> str:
    status, attainable = policy["status"], _condition(policy, "Attainable")
    if attainable is None:
        ready = _condition(policy, "Ready")
        return ready["message"] if ready else ""
    told = f"{attainable['reason']}: {attainable['message']}" if status["matched"] else attainable["message"]
    does = "changes" if policy["spec"]["mode"] == "Enforce" else "would change"
    return f"matches {status['matched']}, {does} {status['changed']}; {told}"


def _condition(service: RawObject, name: str) -> Condition | None:
    conditions: Sequence[Condition] = service.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == name), None)


def _curl(endpoint: str, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
    }
    return f"curl -s {endpoint}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """A reader sees the old text or the new one, never a part."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
