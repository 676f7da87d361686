"""A mover without memory: what it is given ends when told to, in any order that a real one might take."""

from __future__ import annotations

from collections.abc import Sequence

from tidelane.engine.kv.moves import Fetch, Load, Move, Spill, Store


class HandMover:
    """Moves of one kind end in their order, but for those between host memory and disk."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.loads: list[Load] = []
        self.spills: list[Spill] = []
        self.fetches: list[Fetch] = []
        self._ended: list[tuple[Move, bool]] = []

    @property
    def idle(self) -> bool:
        return not (self.stores or self.loads or self.spills or self.fetches)

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Store():
                    self.stores.append(move)
                case Load():
                    self.loads.append(move)
                case Spill():
                    self.spills.append(move)
                case Fetch():
                    self.fetches.append(move)

    def end(self, move: Move, *, well: bool = True) -> None:
        for under_way in (self.stores, self.loads, self.spills, self.fetches):
            if move in under_way:
                under_way.remove(move)  # type: ignore[arg-type]
        if isinstance(move, Load):
            move.arrival.reached(1 << 30)
        self._ended.append((move, well))

    def poll(self) -> list[tuple[Move, bool]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Nothing runs."""
