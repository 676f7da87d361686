"""How far along its chain of blocks each waiting prompt gets, kept up as blocks come and go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from tidelane.engine.kv.keys import Key


class Frontier:
    """`holds` is true of the first keys of a chain up to some point, and of none after it.

    Each change costs a look-up, however many prompts wait and however long they are: whoever waits is found by the key
    at its frontier.
    """

    def __init__(self, holds: Callable[[Key], bool]) -> None:
        self._holds = holds
        self._chains: dict[str, Sequence[Key]] = {}
        self._reached: dict[str, int] = {}
        self._at_last: defaultdict[Key, set[str]] = defaultdict(set)  # of those for which it holds
        self._at_next: defaultdict[Key, set[str]] = defaultdict(set)
        self._moved: set[str] = set()

    def follow(self, name: str, keys: Sequence[Key]) -> int:
        """From now on `name` has this chain, which must not change. How many of its keys `holds` is true of."""
        self._chains[name] = keys
        self._settle(name, self._advance(keys, 0))
        return self._reached[name]

    def leave(self, name: str) -> None:
        self._lift(name)
        del self._chains[name], self._reached[name]
        self._moved.discard(name)

    def reached(self, name: str) -> int:
        return self._reached[name]

    def rose(self, key: Key) -> None:
        """`holds` has become true of `key`."""
        for name in self._at_next.pop(key, ()):
            self._move(name, self._advance(self._chains[name], self._reached[name]))

    def fell(self, key: Key) -> None:
        """`holds` has become false of `key`; of those behind it before, if at all."""
        for name in self._at_last.pop(key, ()):
            self._move(name, self._reached[name] - 1)

    def take_moved(self) -> set[str]:
        """Who has got to another place since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    def _advance(self, keys: Sequence[Key], reached: int) -> int:
        while reached < len(keys) and self._holds(keys[reached]):
            reached += 1
        return reached

    def _move(self, name: str, reached: int) -> None:
        self._lift(name)
        self._settle(name, reached)
        self._moved.add(name)

    def _settle(self, name: str, reached: int) -> None:
        keys = self._chains[name]
        self._reached[name] = reached
        if reached > 0:
            self._at_last[keys[reached - 1]].add(name)
        if reached < len(keys):
            self._at_next[keys[reached]].add(name)

    def _lift(self, name: str) -> None:
        keys, reached = self._chains[name], self._reached[name]
        if reached > 0:
            _discard(self._at_last, keys[reached - 1], name)
        if reached < len(keys):
            _discard(self._at_next, keys[reached], name)


def _discard(waiting: defaultdict[Key, set[str]], key: Key, name: str) -> None:
    names = waiting.get(key)
    if names is not None:
        names.discard(name)
        if not names:
            del waiting[key]
