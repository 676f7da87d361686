"""Ways to choose what a cache of KV blocks keeps, each as its authors describe it, for comparison with ours.

None knows of chains: blocks are looked up one by one, the end of a prompt before its beginning, so that beginnings are
the last that were used. What is found of a prompt is the beginning that is there without a gap.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Protocol


class Cache(Protocol):
    """Of blocks by name, no more than it was made for."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int) -> None:
        """Look it up; it is put in if it is missing."""
        ...


def found(cache: Cache, prompt: Sequence[int]) -> int:
    """How many blocks of the prompt are found. Afterwards it has been used."""
    blocks = sum(1 for _ in takewhile(cache.__contains__, prompt))
    for block in reversed(prompt):
        cache.use(block)
    return blocks


class S3Fifo:
    """Three FIFO queues (Yang et al., SOSP 2023, algorithm 1): a tenth of the room for what is new, the rest for what
    was used again, and the names of as many as that which have left the first."""

    MOST_USES = 3

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._few = max(1, blocks // 10)
        self._new: deque[int] = deque()
        self._kept: deque[int] = deque()
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}  # since it was put in or passed over

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(self._uses[block] + 1, self.MOST_USES)
            return
        while len(self._uses) >= self._blocks:
            if len(self._new) >= self._few or not self._kept:
                self._leave_new()
            else:
                self._leave_kept()
        if block in self._gone:
            del self._gone[block]
            self._kept.append(block)
        else:
            self._new.append(block)
        self._uses[block] = 0

    def _leave_new(self) -> None:
        while self._new:
            block = self._new.popleft()
            if self._uses[block] > 1:
                self._uses[block] = 0
                self._kept.append(block)
            else:
                del self._uses[block]
                self._gone[block] = None
                if len(self._gone) > self._blocks - self._few:
                    self._gone.popitem(last=False)
                return

    def _leave_kept(self) -> None:
        while self._kept:
            block = self._kept.popleft()
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] -= 1
            self._kept.append(block)


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST 2003, figure 4): `_once` and `_again` are T1 and T2, `_left_once`
    and `_left_again` B1 and B2, and `_aim` is p."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._aim = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._left_once: OrderedDict[int, None] = OrderedDict()
        self._left_again: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def use(self, block: int) -> None:
        if block in self:
            self._once.pop(block, None)
            self._again.pop(block, None)
        elif block in self._left_once:
            self._aim = min(self._blocks, self._aim + max(1.0, len(self._left_again) / len(self._left_once)))
            self._replace(again=False)
            del self._left_once[block]
        elif block in self._left_again:
            self._aim = max(0.0, self._aim - max(1.0, len(self._left_once) / len(self._left_again)))
            self._replace(again=True)
            del self._left_again[block]
        else:
            self._make_room()
            self._once[block] = None
            return
        self._again[block] = None

    def _make_room(self) -> None:
        once = len(self._once) + len(self._left_once)
        if once == self._blocks:
            if len(self._once) < self._blocks:
                self._left_once.popitem(last=False)
                self._replace(again=False)
            else:
                self._once.popitem(last=False)
        elif once + len(self._again) + len(self._left_again) >= self._blocks:
            if once + len(self._again) + len(self._left_again) == 2 * self._blocks:
                self._left_again.popitem(last=False)
            self._replace(again=False)

    def _replace(self, *, again: bool) -> None:
        if len(self._once) + len(self._again) < self._blocks:
            return
        if self._once and (len(self._once) > self._aim or (again and len(self._once) == self._aim)):
            block, _ = self._once.popitem(last=False)
            self._left_once[block] = None
        else:
            block, _ = self._again.popitem(last=False)
            self._left_again[block] = None


class Frequency:
    """Greedy dual with frequency (Cherkasova, HPL-98-69): the least of uses times `cost`, on top of what the last one
    that left had, so that what was used often once leaves too. With equal costs it is LFU with dynamic ageing."""

    def __init__(self, blocks: int, cost: Mapping[int, float] | None = None) -> None:
        self._blocks = blocks
        self._cost = cost or {}
        self._floor = 0.0
        self._uses: Counter[int] = Counter()
        self._worth: dict[int, tuple[float, int]] = {}  # and when
        self._heap: list[tuple[float, int, int]] = []
        self._now = 0

    def __contains__(self, block: int) -> bool:
        return block in self._worth

    def use(self, block: int) -> None:
        while block not in self._worth and len(self._worth) >= self._blocks:
            worth, at, least = heapq.heappop(self._heap)
            if self._worth.get(least) == (worth, at):
                self._floor = worth
                del self._worth[least], self._uses[least]
        self._now += 1
        self._uses[block] += 1
        worth = self._floor + self._uses[block] * self._cost.get(block, 1.0)
        self._worth[block] = worth, self._now
        heapq.heappush(self._heap, (worth, self._now, block))


def optimum(prompts: Sequence[Sequence[int]], blocks: int) -> int:
    """The most blocks that a cache with room for `blocks` can find of these prompts, which it knows beforehand.

    Belady's rule: what is used again latest goes first, be it what has just come. All blocks count alike, and a
    prompt's are used at once; so to find most is to keep as many as possible of the spans between two uses of a block,
    no more than `blocks` at any time, and to drop the one that ends latest is optimal for that (Faigle and Nawijn,
    "Note on scheduling intervals on-line", 1995). Who uses a block uses those before it, so that of a chain the end
    goes first: what is found is a beginning, and no cache that holds only beginnings can find more or needs to find
    less. It is the optimum, not only a bound.
    """
    next_use: list[list[int]] = []
    coming: dict[int, int] = {}
    for number in range(len(prompts) - 1, -1, -1):
        next_use.append([coming.get(block, len(prompts)) for block in prompts[number]])
        coming.update(dict.fromkeys(prompts[number], number))
    next_use.reverse()
    kept: dict[int, int] = {}  # until when
    latest: list[tuple[int, int, int]] = []  # use, depth, block
    total = 0
    for prompt, uses in zip(prompts, next_use, strict=True):
        total += sum(1 for _ in takewhile(kept.__contains__, prompt))
        for depth, (block, use) in enumerate(zip(prompt, uses, strict=True)):
            kept[block] = use
            heapq.heappush(latest, (-use, -depth, block))
        while len(kept) > blocks:
            use, _, block = heapq.heappop(latest)
            if kept.get(block) == -use:
                del kept[block]
    return total
