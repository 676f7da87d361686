"""Which port an engine serves on: the same one as long as it is free, so that endpoints seldom move."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Collection

from tidelane.agent.errors import TryLater
from tidelane.rpc.wire import ReplicaRef

# Below the range from which kernels draw ports for outgoing connections, so that none of those takes one of ours.
PORTS = range(20000, 30000)


def choose_port(
    ref: ReplicaRef, host: str, asked: int | None, last: int | None, taken: Collection[int], ports: range = PORTS
) -> int:
    """`asked` if the service names a port; else `last` if it is free; else the next free one. Raises TryLater."""
    if asked is not None:
        if asked in taken or not is_free(host, asked):
            raise TryLater(f"port {asked} is in use on {host}")
        return asked
    if last is not None and last not in taken and is_free(host, last):
        return last
    # From a place of the replica's own, so that two agents on one machine seldom look at the same port at once.
    start = int.from_bytes(hashlib.sha256(str(ref).encode()).digest()[:4]) % len(ports)
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        if port not in taken and is_free(host, port):
            return port
    raise TryLater(f"no free port from {ports.start} to {ports.stop - 1} on {host}")


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do; without it a port whose last connections linger counts as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
