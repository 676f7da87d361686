"""An operator that waits for its turn, acts, and stops at once when it may act no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from tidelane.operator.errors import Deposed
from tidelane.operator.lease import Candidate

log = logging.getLogger(__name__)

_DEFAULT_PORT: Final = 80


async def act_in_turn(
    candidate: Candidate, liveness: str | None, act: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    """Waits until `candidate` acts, then lets `act` run until it ends, and sets its event when it must.

    Raises Deposed if that was because another may act by now.
    """
    async with _answering(liveness):
        await candidate.attempt()
        if not candidate.acts:
            log.info("another operator acts; standing by")
        while not candidate.acts:
            await asyncio.sleep(candidate.every_s)
            await candidate.attempt()
    log.info("this operator acts now")
    deposed = asyncio.Event()
    keeping = asyncio.create_task(_keep(candidate, deposed), name="lease")
    try:
        await act(deposed)
        lost = deposed.is_set()
    finally:
        keeping.cancel()
        (fault,) = await asyncio.gather(keeping, return_exceptions=True)
    if lost:
        raise Deposed("the Lease was not renewed in time: another operator may act by now") from fault
    await candidate.give_back()


async def _keep(candidate: Candidate, deposed: asyncio.Event) -> None:
    try:
        while candidate.acts:
            await candidate.attempt()
            await asyncio.sleep(candidate.every_s)
    finally:
        # Also after a fault: who does not renew must not live on, answering probes and writing nothing.
        deposed.set()


@asynccontextmanager
async def _answering(url: str | None) -> AsyncIterator[None]:
    """A liveness probe is told that this process lives, though it does nothing yet."""
    if url is None:
        yield
        return

    async def standing_by(_: web.Request) -> web.Response:
        return web.json_response({"control": "standing by"})

    where = urlsplit(url)
    application = web.Application()
    application.router.add_get(where.path or "/", standing_by)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, where.hostname, where.port or _DEFAULT_PORT).start()
        yield
    finally:
        await runner.cleanup()
