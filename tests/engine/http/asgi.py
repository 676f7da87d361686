"""The application without a socket: a test decides when bytes come and when the client leaves."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, cast

from tidelane.engine.channel import Endpoint, Facts, Submit, ToFront, ToLoop
from tidelane.engine.http.app import build_app
from tidelane.engine.http.config import Limits
from tidelane.engine.http.link import LoopLink
from tidelane.engine.http.metrics import Metrics
from tidelane.engine.http.service import Service


@dataclass
class SilentLoop:
    """The loop's end of a channel: takes everything, says only what a test puts into `says`."""

    says: list[ToFront] = field(default_factory=list)
    heard: list[ToLoop] = field(default_factory=list)
    descriptor: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK))

    def send(self, message: ToLoop) -> None:
        self.heard.append(message)

    def receive(self, timeout_s: float) -> ToFront | None:
        return self.says.pop(0) if self.says else None

    def fileno(self) -> int:
        return self.descriptor

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def submitted(self) -> list[Submit]:
        return [message for message in self.heard if isinstance(message, Submit)]


def make_service(loop: SilentLoop, workers: Executor, limits: Limits | None = None) -> Service:
    def on_facts(facts: Facts) -> None:
        raise AssertionError(f"no facts were to come: {facts}")

    endpoint = cast("Endpoint[ToLoop, ToFront]", loop)
    link = LoopLink(endpoint, asyncio.get_running_loop(), on_facts)
    metrics = Metrics("tiny", lambda: link.heartbeat)
    numbers = itertools.count(1)
    return Service(
        "tiny",
        limits or Limits(),
        link,
        metrics,
        workers,
        monotonic_s=lambda: 1.0,
        unix_s=lambda: 1_000_000.0,
        random_bits=lambda bits: next(numbers),
    )


class Exchange:
    """One request to the application and what came back."""

    def __init__(
        self, service: Service, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.left = asyncio.Event()
        self._body = None if body is None else json.dumps(body).encode()
        named = {"content-type": "application/json"} | (headers or {})
        self._scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "client": ("x", 1),
            "server": ("x", 2),
        }  # fmt: skip
        self._app = build_app(service)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def answered(self) -> int:
        await self.task
        assert self.status is not None
        return self.status

    def leave(self) -> None:
        self.left.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
