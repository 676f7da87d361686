"""Which of several operators acts: the one that holds a Lease; the others stand by.

In the manner of client-go's leader election (k8s.io/client-go/tools/leaderelection): no two machines' clocks are ever
compared. Who does not hold the Lease takes it once it has not changed for its duration by his own clock; who holds it
acts only within a shorter time of having begun the last renewal that went well. So while two may believe to hold it for
as long as a write is under way, no two may act.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tidelane.operator.errors import Conflict, Refused, Retry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Who has not renewed within `act_s` no longer acts; after `duration_s` another takes over."""

    duration_s: float = 15.0
    act_s: float = 10.0
    every_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Record:
    """The Lease as it was read. `version` is another after each write; `holder` empty: it was given back."""

    holder: str
    version: str
    duration_s: float
    transitions: int = 0


class Leases(Protocol):
    """One Lease. Every method raises Retry when the cluster cannot be reached, and Refused when it says no."""

    async def read(self) -> Record | None: ...

    async def create(self, holder: str, duration_s: float) -> Record:
        """Raises Conflict if there is one by now."""
        ...

    async def replace(self, record: Record, holder: str, duration_s: float, transitions: int) -> Record:
        """Raises Conflict unless it is still that version."""
        ...


def may_take(record: Record, me: str, unchanged_s: float) -> bool:
    """Whether the Lease is free, or mine, or its holder has been silent for too long."""
    return record.holder in ("", me) or unchanged_s >= record.duration_s


class Candidate:
    """One operator that wants to act. `me` must be no other process's name, ever; `clock` must not stop while the
    process does."""

    def __init__(self, leases: Leases, me: str, clock: Callable[[], float], timing: LeaseTiming | None = None) -> None:
        self._leases = leases
        self._me = me
        self._clock = clock
        self._timing = timing or LeaseTiming()
        self._seen: Record | None = None
        self._seen_s = 0.0  # since when the Lease has been as it was seen
        self._renewed_s: float | None = None
        self._refusal = ""
        self._refused_since_s: float | None = None

    @property
    def faults(self) -> list[str]:
        """Why this operator could never act: what the cluster has answered for as long as a Lease lasts.

        A cluster that does not answer is no such reason: whoever stands by must be there when it comes back.
        """
        since_s = self._refused_since_s
        return [self._refusal] if since_s is not None and self._clock() - since_s >= self._timing.duration_s else []

    @property
    def acts(self) -> bool:
        """Nobody else does now."""
        return self._renewed_s is not None and self._clock() - self._renewed_s < self._timing.act_s

    @property
    def every_s(self) -> float:
        """How long to wait between two tries."""
        return self._timing.every_s

    async def attempt(self) -> None:
        """To take or to renew the Lease; to be called again and again, also when it did not go well."""
        # Before anything is sent: others count from when they see the change, which is later.
        began_s = self._clock()
        refusal = ""
        try:
            if await self._take():
                self._renewed_s = began_s
        except Conflict:
            log.info("the Lease was changed by another operator")
        except Refused as error:
            refusal = str(error)
            # Once: it is the same every 2 s, and the probe tells it too.
            if refusal != self._refusal:
                log.error("the Lease cannot be read or renewed: %s", refusal)
        except Retry as error:
            log.warning("the Lease cannot be read or renewed: %s", error)
            return
        self._note(refusal)

    async def give_back(self) -> None:
        """So that another takes over at once. Nothing may act any more."""
        if self.acts and self._seen is not None:
            self._renewed_s = None
            try:
                await self._leases.replace(self._seen, "", self._timing.duration_s, self._seen.transitions)
            except Retry as error:
                log.warning("the Lease cannot be given back: %s", error)

    def _note(self, refusal: str) -> None:
        if refusal and self._refused_since_s is None:
            self._refused_since_s = self._clock()
        elif not refusal:
            if self._refusal:
                log.info("the Lease can be read and renewed again")
            self._refused_since_s = None
        self._refusal = refusal

    async def _take(self) -> bool:
        duration_s = self._timing.duration_s
        record = await self._leases.read()
        if record is None:
            self._see(await self._leases.create(self._me, duration_s))
            return True
        self._see(record)
        if not may_take(record, self._me, self._clock() - self._seen_s):
            return False
        transitions = record.transitions + (record.holder != self._me)
        self._see(await self._leases.replace(record, self._me, duration_s, transitions))
        return True

    def _see(self, record: Record) -> None:
        if self._seen is None or self._seen.version != record.version:
            self._seen, self._seen_s = record, self._clock()
