"""Which block belongs to whom: allocation of block ids, nothing of their contents.

Prefers runs of adjacent blocks, because attention reads a run in place and must copy anything else together first.
Correctness never depends on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class OutOfBlocks(RuntimeError):
    """The caller asked for more blocks than are free; it should have looked first."""


class BlockPool:
    """Block ids 0 to `total` - 1, each free, or held once, or kept back behind the fence."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("a pool needs at least one block")
        self.total = total
        # Free runs as parallel sorted lists: run i is [starts[i], ends[i]).
        self._starts = [0]
        self._ends = [total]
        self.free = total
        self.fenced_from = total  # where there is no fence
        self._kept: set[int] = set()

    @property
    def kept(self) -> int:
        """Blocks behind the fence that nobody holds any more."""
        return len(self._kept)

    def fence(self, first: int) -> None:
        """Blocks `first` and on are not allocated any more: those that are free are kept back, the others once they are
        released. There is one fence at a time."""
        if self.fenced_from < self.total:
            raise ValueError(f"there is a fence before block {self.fenced_from}")
        for start, end in zip(self._starts, self._ends, strict=True):
            self._kept.update(range(max(start, first), end))
        left = [(start, min(end, first)) for start, end in zip(self._starts, self._ends, strict=True) if start < first]
        self._starts, self._ends = [start for start, _ in left], [end for _, end in left]
        self.free -= len(self._kept)
        self.fenced_from = first

    def unfence(self) -> None:
        """What was kept back is free again."""
        self.fenced_from, kept = self.total, sorted(self._kept)
        self._kept.clear()
        self.release(kept)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` free blocks; first those adjacent to block `after`, the last of the sequence that grows."""
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.free} of {self.total} free")
        taken: list[int] = []
        if after is not None:
            taken += self._take_from(after + 1, count)
        while len(taken) < count:
            taken += self._take_from(self._place(count - len(taken)), count - len(taken))
        self.free -= count
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give `blocks` back. Raises ValueError, changing nothing more, on one that is free already."""
        for block in blocks:
            if self.fenced_from <= block < self.total and block not in self._kept:
                self._kept.add(block)
                continue
            i = bisect_right(self._starts, block)
            if not 0 <= block < self.total or block in self._kept or (i and block < self._ends[i - 1]):
                raise ValueError(f"block {block} is not held")
            joins_left = i > 0 and self._ends[i - 1] == block
            joins_right = i < len(self._starts) and self._starts[i] == block + 1
            if joins_left and joins_right:
                self._ends[i - 1] = self._ends.pop(i)
                del self._starts[i]
            elif joins_left:
                self._ends[i - 1] += 1
            elif joins_right:
                self._starts[i] -= 1
            else:
                self._starts.insert(i, block)
                self._ends.insert(i, block + 1)
            self.free += 1

    def _place(self, count: int) -> int:
        """Where a new run of `count` should start: in the middle of the largest free run, so that both it and its
        left neighbour can grow in place; at its start when the half would not do."""
        i = max(range(len(self._starts)), key=lambda run: self._ends[run] - self._starts[run])
        start, length = self._starts[i], self._ends[i] - self._starts[i]
        in_use_before = start > 0
        return start + length // 2 if in_use_before and length // 2 >= 2 * count else start

    def _take_from(self, start: int, count: int) -> list[int]:
        """Up to `count` adjacent free blocks from `start` on; none if `start` is held."""
        i = bisect_right(self._starts, start) - 1
        if i < 0 or start >= self._ends[i]:
            return []
        run_start, run_end = self._starts[i], self._ends[i]
        stop = min(start + count, run_end)
        left, right = (run_start, start), (stop, run_end)
        pieces = [piece for piece in (left, right) if piece[0] < piece[1]]
        self._starts[i : i + 1] = [piece[0] for piece in pieces]
        self._ends[i : i + 1] = [piece[1] for piece in pieces]
        return list(range(start, stop))
