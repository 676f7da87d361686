"""How many prompts of a conversation came before this one, told by their blocks alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tidelane.engine.kv.keys import Key


class Turns:
    """Remembers `limit` prompts, those met last, by the name of their last block: far longer than their KV stays, since
    it takes some hundred bytes a prompt."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[Key, int] = OrderedDict()

    def next(self, keys: Sequence[Key]) -> int:
        """Of a prompt of these blocks, which is remembered: one more than of the longest prompt that it goes on from. 1
        if there is none. Sent again it is of the same turn. Looks at each key once at most."""
        if not keys:
            return 1
        before = next((key for key in reversed(keys) if key in self._turns), None)
        turn = 1
        if before is not None:
            self._turns.move_to_end(before)
            turn = self._turns[before] + (before != keys[-1])
        self._turns[keys[-1]] = turn
        if len(self._turns) > self._limit:
            self._turns.popitem(last=False)
        return turn
