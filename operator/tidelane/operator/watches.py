"""Whether the watches do what they are there for, and what is done about what they may lose.

A watch that ends may be begun again with a list, and a list does not tell what has gone meanwhile; a watch may also die
in silence (kopf#980, kopf#1276). So everything is listed from time to time, and soon after any watch began anew, and
what a list told first must then be told by its watch too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol

from tidelane.operator.errors import Retry
from tidelane.operator.mirror import Mirror, version_of
from tidelane.operator.resources import ObjectRef, RawObject

log = logging.getLogger(__name__)

_REFRESH_S: Final = 300.0
# After a watch began anew: many do so together, and all tell first what they listed.
_SETTLE_S: Final = 2.0
_RETRY_S: Final = 15.0
# For a watch to tell what a list did, and for one that died to be begun again.
_PATIENCE_S: Final = 60.0


class Listing(Protocol):
    async def refresh(self) -> None:
        """Raises Retry."""


class Watches:
    """`live` names the kinds that somebody watches at this moment; `kinds` are those that somebody should."""

    def __init__(
        self,
        mirror: Mirror,
        listing: Listing,
        kinds: Collection[str],
        live: Callable[[], Collection[str]],
        clock: Callable[[], float],
    ) -> None:
        self._mirror = mirror
        self._listing = listing
        self._live = live
        self._clock = clock
        self._seen_live_s = {kind: clock() for kind in kinds}
        self._began_anew = asyncio.Event()

    def told(self, kind: str | None, raw: RawObject) -> None:
        """By a watch: `kind` is the event's, None while it lists."""
        if kind == "DELETED":
            self._mirror.gone(raw["kind"], ObjectRef.of(raw), raw["metadata"]["uid"], version_of(raw))
            return
        self._mirror.watched(raw)
        if kind is None:
            self._began_anew.set()

    async def run(self) -> None:
        """Lists everything from time to time, until cancelled."""
        wait_s = _REFRESH_S
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._began_anew.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(_SETTLE_S)
            self._began_anew.clear()
            try:
                await self._listing.refresh()
                wait_s = _REFRESH_S
            except Retry as error:
                log.warning("cannot list everything: %s", error)
                wait_s = _RETRY_S

    @property
    def faults(self) -> Sequence[str]:
        """For how long they may have been so is not counted against them."""
        now_s, live = self._clock(), self._live()
        for kind in self._seen_live_s:
            if kind in live:
                self._seen_live_s[kind] = now_s
        dead = [kind for kind, at_s in self._seen_live_s.items() if now_s - at_s > _PATIENCE_S]
        deaf = self._mirror.deaf(_PATIENCE_S)
        return [*(f"nobody watches {kind}" for kind in dead), *(f"the watch on {kind} is deaf" for kind in deaf)]


def live_by_task_name(prefixes: dict[str, str]) -> Callable[[], Collection[str]]:
    """The kinds of which a task runs whose name begins so."""

    def live() -> Collection[str]:
        names: list[Any] = [task.get_name() for task in asyncio.all_tasks()]
        return {kind for kind, prefix in prefixes.items() if any(name.startswith(prefix) for name in names)}

    return live
