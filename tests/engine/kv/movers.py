"""A mover without memory: what it is given ends when told to, in any order that a real one might take."""

from __future__ import annotations

from collections.abc import Sequence

from tidelane.engine.kv.moves import Load, Move, Store


class HandMover:
    """Stores end in their order, and so do loads."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.loads: list[Load] = []
        self._ended: list[tuple[Move, bool]] = []

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            (self.stores if isinstance(move, Store) else self.loads).append(move)  # type: ignore[arg-type]

    def end_store(self, *, well: bool = True) -> None:
        if self.stores:
            self._ended.append((self.stores.pop(0), well))

    def end_load(self) -> None:
        if self.loads:
            load = self.loads.pop(0)
            load.arrival.reached(1 << 30)
            self._ended.append((load, True))

    def poll(self) -> list[tuple[Move, bool]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Nothing runs."""
