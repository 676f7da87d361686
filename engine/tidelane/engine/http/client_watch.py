"""Noticing that a client left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class ClientWatch:
    """Notices that the client has left, which ASGI tells only to who asks."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._then: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._watch(receive))

    def when_gone(self, then: Callable[[], None]) -> None:
        self._then = then
        if self.gone:
            then()

    def stop(self) -> None:
        self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._then is not None:
            self._then()
