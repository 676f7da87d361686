"""Where the agents are: fixed addresses, and DNS names all of whose addresses are agents (a headless Service)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

log = logging.getLogger(__name__)

_SCHEME: Final = "dns:"
_PERIOD_S: Final = 5.0

# The addresses of a host, without ports. Raises OSError.
Resolve = Callable[[str], Awaitable[Iterable[str]]]


async def resolve(host: str) -> Iterable[str]:
    """What the system's resolver says."""
    # Without AI_ADDRCONFIG: a pod's only address may be one that the C library does not count.
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Agents:
    """`targets` are HOST:PORT, or dns:HOST:PORT for every address of HOST. Raises ValueError if one is neither."""

    def __init__(self, targets: Iterable[str], resolve: Resolve = resolve) -> None:
        self._fixed: set[str] = set()
        # Per name its port and what it last led to.
        self._named: dict[str, tuple[str, set[str]]] = {}
        self._resolve = resolve
        for target in targets:
            host, colon, port = target.removeprefix(_SCHEME).rpartition(":")
            if not target.startswith(_SCHEME):
                self._fixed.add(target)
            elif not (host and colon and port.isdecimal()):
                raise ValueError(f"{target}: say dns:HOST:PORT")
            else:
                self._named[host] = (port, set())

    async def look(self) -> set[str]:
        """All targets now. A name that cannot be resolved leads where it led before."""
        for host, (port, before) in self._named.items():
            try:
                addresses = await self._resolve(host)
            except OSError as error:
                log.warning("agents of %s: %s", host, error)
                continue
            now = {f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in addresses}
            if now != before:
                log.info("agents of %s: %s", host, ", ".join(sorted(now)))
            self._named[host] = (port, now)
        return self._fixed.union(*(found for _, found in self._named.values()))

    async def keep_looking(self, follow: Callable[[Iterable[str]], None]) -> None:
        """Until cancelled; at once over if there is no name to resolve."""
        while self._named:
            await asyncio.sleep(_PERIOD_S)
            follow(await self.look())
