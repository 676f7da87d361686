"""Memory for KV below a virtual device, and the time that its copies take."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tidelane.engine.kv.moves import Arrival, Fetch, Load, Move, Store


@dataclass(frozen=True, slots=True)
class Tiers:
    """Slots for blocks in host memory and on a disk, and the seconds that the copy of one block takes between the
    device and host memory, and between host memory and the disk, each way on a queue of its own. `prefetch`: what is
    in them is brought up before it is asked for."""

    host_slots: int
    disk_slots: int
    host_block_s: float
    disk_block_s: float
    prefetch: bool = False

    def fetch_s(self, blocks: int) -> float:
        """From the disk to host memory."""
        return blocks * self.disk_block_s


NO_TIERS = Tiers(0, 0, 0.0, 0.0)


# What a PCIe 5 link gives to one GPU in practice, and a good NVMe disk.
HOST_BYTES_PER_S = 50e9
DISK_BYTES_PER_S = 7e9


@dataclass(frozen=True, slots=True)
class TierSizes:
    """As they are given to a service: bytes of each engine's, and bytes a second each way."""

    host_bytes: float
    disk_bytes: float = 0.0
    host_bytes_per_s: float = HOST_BYTES_PER_S
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    prefetch: bool = False

    def in_blocks(self, block_bytes: float) -> Tiers | None:
        """None if there is no room for one."""
        host_slots, disk_slots = int(self.host_bytes / block_bytes), int(self.disk_bytes / block_bytes)
        if not host_slots:
            return None
        host_block_s, disk_block_s = block_bytes / self.host_bytes_per_s, block_bytes / self.disk_bytes_per_s
        return Tiers(host_slots, disk_slots, host_block_s, disk_block_s, self.prefetch)


class VirtualMover:
    """Copies of one kind follow each other; those of different kinds do not disturb each other, nor the device.

    A load brings layer after layer, at an even pace.
    """

    def __init__(self, clock: Callable[[], float], tiers: Tiers) -> None:
        self._clock = clock
        self._tiers = tiers
        self._free_s: dict[type[Move], float] = {}
        self._under_way: list[tuple[float, int, Move]] = []  # a heap, by end
        self._fetch_ends_s: deque[float] = deque()
        self._loads: dict[Arrival, tuple[float, float]] = {}  # from when until when

    @property
    def next_end_s(self) -> float | None:
        """When the next move ends."""
        return self._under_way[0][0] if self._under_way else None

    @property
    def next_fetch_s(self) -> float | None:
        """When the next of those ends that waiting prompts wait for."""
        return self._fetch_ends_s[0] if self._fetch_ends_s else None

    def start(self, moves: Sequence[Move]) -> None:
        now_s = self._clock()
        for move in moves:
            kind = type(move)
            begin_s = max(now_s, self._free_s.get(kind, 0.0))
            end_s = begin_s + self._seconds(move)
            self._free_s[kind] = end_s
            heapq.heappush(self._under_way, (end_s, move.number, move))
            if isinstance(move, Load):
                self._loads[move.arrival] = (begin_s, end_s)
            elif isinstance(move, Fetch):
                self._fetch_ends_s.append(end_s)

    def poll(self) -> list[tuple[Move, bool]]:
        now_s = self._clock()
        ended: list[tuple[Move, bool]] = []
        while self._under_way and self._under_way[0][0] <= now_s:
            move = heapq.heappop(self._under_way)[2]
            ended.append((move, True))
            if isinstance(move, Load):
                del self._loads[move.arrival]
            elif isinstance(move, Fetch):
                self._fetch_ends_s.popleft()
        return ended

    def there_s(self, arrivals: Iterable[Arrival], part: float) -> float:
        """When the first `part` of the layers of all of these is there; 0 if they are all here."""
        loads = [self._loads[arrival] for arrival in arrivals if arrival in self._loads]
        return max((begin_s + part * (end_s - begin_s) for begin_s, end_s in loads), default=0.0)

    def close(self) -> None:
        """There are no threads."""

    def _seconds(self, move: Move) -> float:
        match move:
            case Load():
                return len(move.keys) * self._tiers.host_block_s
            case Store():
                return self._tiers.host_block_s
            case _:
                return self._tiers.disk_block_s
