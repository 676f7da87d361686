"""An operator that waits for its turn, acts, and stops at once when it may act no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tidelane.operator.errors import Deposed
from tidelane.operator.lease import Candidate
from tidelane.operator.probe import Probe

log = logging.getLogger(__name__)


async def act_in_turn(candidate: Candidate, probe: Probe, act: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Waits until `candidate` acts, then lets `act` run until it ends, and sets its event when it must.

    Raises Deposed if that was because another may act by now.
    """
    await candidate.attempt()
    if not candidate.acts:
        log.info("not acting yet; standing by")
        probe.enter("standing by", ready=True, faults=lambda: candidate.faults)
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
