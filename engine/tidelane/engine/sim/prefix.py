"""Which beginnings of prompts are in the KV cache: by the hashes of their blocks, as Mooncake's trace gives them.

An approximation of a cache that shares blocks: what running requests hold can be shared but is not shared in the pool
(each has blocks of its own), and what nobody holds stays, least recently used first to go, as long as the pool's free
blocks would hold it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from tidelane.engine.request import Request

# Tokens of one hashed block in Mooncake's trace.
HASHED_TOKENS = 512


class PrefixCache:
    """`free_tokens` says how many tokens the pool could hold at this moment besides those of running requests."""

    def __init__(self, free_tokens: Callable[[], int]) -> None:
        self._free_tokens = free_tokens
        self._hashes: dict[str, Sequence[int]] = {}  # by request under way
        self._held: Counter[int] = Counter()  # by how many running requests
        self._holders: set[str] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.hit_tokens = 0

    def expect(self, request_id: str, hashes: Sequence[int]) -> None:
        """A request is on its way, whose prompt has these blocks."""
        if hashes:
            self._hashes[request_id] = hashes

    def cached_tokens(self, request: Request) -> int:
        """How many of its prompt's first tokens need no computing; at least one is left to compute."""
        self._trim()
        hits = 0
        for block in self._hashes.get(request.id, ()):
            if block in self._idle:
                self._idle.move_to_end(block)
            elif block not in self._held:
                break
            hits += 1
        return min(hits * HASHED_TOKENS, len(request.prompt) - 1)

    def computed(self, request_id: str) -> None:
        """Its whole prompt is in the cache from now on."""
        if request_id in self._holders:
            return
        self._holders.add(request_id)
        for block in self._hashes.get(request_id, ()):
            self._held[block] += 1
            self._idle.pop(block, None)

    def ended(self, request_id: str) -> None:
        """It gives its blocks back. The last ones go idle first: without those before them they are of no use."""
        hashes = self._hashes.pop(request_id, ())
        if request_id not in self._holders:
            return
        self._holders.remove(request_id)
        for block in reversed(hashes):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                self._idle[block] = None
        self._trim()

    def _trim(self) -> None:
        room = self._free_tokens() // HASHED_TOKENS
        while len(self._idle) > room:
            self._idle.popitem(last=False)
