"""Which of the blocks that nobody holds goes first when room is needed."""

from __future__ import annotations

from tidelane.engine.kv.keys import Key


class LeastRecentlyUsed:
    """In the order in which they were given up. Whoever adds a chain from its end keeps beginnings longest."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}  # keeps the order of insertion

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key) -> None:
        self._keys[key] = None

    def remove(self, key: Key) -> None:
        del self._keys[key]

    def victim(self) -> Key:
        return next(iter(self._keys))
