"""What probes of the operator are told, by one server from its start to its end.

A server for each phase, or kopf's, would leave gaps in which a probe finds nobody, and its kubelet ends an operator
that has just got its turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from tidelane.operator.answering import Answer, answered

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
        """Liveness at `url`, and readiness beside it; None: nowhere. Raises ValueError if it cannot be."""
        if url is None:
            yield
            return
        async with answered("--liveness", url, _told(self.liveness), {READY_PATH: _told(self.readiness)}):
            yield


def _told(verdict: Callable[[], tuple[int, str]]) -> Answer:
    def answer() -> web.Response:
        status, text = verdict()
        return web.json_response({"control": text}, status=status)

    return answer
