"""What probes of the operator are told, by one server from its start to its end.

A server for each phase, or kopf's, would leave gaps in which a probe finds nobody, and its kubelet ends an operator
that has just got its turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

_DEFAULT_PORT: Final = 80
READY_PATH: Final = "/readyz"


class Probe:
    """`enter` says what the process does from now on; what is answered is worked out when a probe asks."""

    def __init__(self) -> None:
        self.enter("starting", ready=False)

    def enter(self, phase: str, ready: bool, faults: Callable[[], Sequence[str]] = tuple) -> None:
        """`ready`: a rollout may go on. `faults`: why the process should be started again; none is well."""
        self._phase = phase
        self._ready = ready
        self._faults = faults

    def liveness(self) -> tuple[int, str]:
        """HTTP status and text."""
        faults = self._faults()
        return (503, "; ".join(faults)) if faults else (200, self._phase)

    def readiness(self) -> tuple[int, str]:
        status, text = self.liveness()
        return (status if self._ready else 503), text

    @asynccontextmanager
    async def served(self, url: str | None) -> AsyncIterator[None]:
        """Liveness at `url`, such as http://0.0.0.0:8080/healthz, and readiness beside it; None: nowhere.

        Raises ValueError if it cannot be.
        """
        if url is None:
            yield
            return
        where = urlsplit(url)
        path = where.path or "/"
        if where.scheme != "http" or not where.hostname or path == READY_PATH:
            raise ValueError(f"--liveness: {url} must be like http://0.0.0.0:8080/healthz, and not {READY_PATH}")
        application = web.Application()
        for at, answer in ((path, self.liveness), (READY_PATH, self.readiness)):
            application.router.add_get(at, _handler(answer))
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, where.hostname, where.port or _DEFAULT_PORT).start()
            except OSError as error:
                raise ValueError(f"--liveness: cannot listen on {where.netloc}: {error.strerror}") from error
            yield
        finally:
            await runner.cleanup()


def _handler(answer: Callable[[], tuple[int, str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        status, text = answer()
        return web.json_response({"control": text}, status=status)

    return handle
