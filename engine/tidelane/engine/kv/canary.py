"""The canary: a shadow of every KV slot, which says what the slot should hold.

For debugging; it costs about what attention does. A slot with another token's KV, or with bytes that nobody wrote there
on purpose, would come out as wrong text much later; against its shadow it is found before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
# What the shadow of a slot says while it is being written, and before it ever was.
_OPEN, _NEVER = -1, -2


class WrongKV(RuntimeError):
    """The engine must stop: what it would answer from here on is not to be trusted."""


class Canary:
    """For each slot the token and its position, and what `prints` made of the slot's bytes: [slots] to [slots].

    What moves between tiers takes its shadow along.
    """

    def __init__(self, blocks: int, block_tokens: int, prints: Callable[[Slots], Slots]) -> None:
        self.block_tokens = block_tokens
        self._prints = prints
        self._host: dict[int, tuple[Slots, Slots, Slots]] = {}  # by slot
        self._disk: dict[int, tuple[Slots, Slots, Slots]] = {}
        self._tokens = np.full(blocks * block_tokens, _NEVER, dtype=np.int64)
        self._positions = np.zeros_like(self._tokens)
        self._bytes = np.zeros_like(self._tokens)

    def opens(self, blocks: Sequence[int], start: int, stop: int) -> None:
        """Positions [start, stop) of a sequence with these blocks are written from now on."""
        self._tokens[self._slots(blocks, start, stop)] = _OPEN

    def wrote(self, blocks: Sequence[int], tokens: Sequence[int], start: int, stop: int) -> None:
        """They are written, and will not change. `tokens` are those of the sequence, from its first."""
        slots = self._slots(blocks, start, stop)
        self._tokens[slots] = tokens[start:stop]
        self._positions[slots] = np.arange(start, stop)
        self._bytes[slots] = self._prints(slots)

    def check(self, who: str, blocks: Sequence[int], tokens: Sequence[int], stop: int) -> None:
        """Raises WrongKV unless positions [0, stop) are as they were written, and of these tokens."""
        slots = self._slots(blocks, 0, stop)
        places = np.arange(stop)
        self._compare(who, "token", slots, self._tokens[slots], np.asarray(tokens[:stop], dtype=np.int64))
        self._compare(who, "position", slots, self._positions[slots], places)
        self._compare(who, "bytes", slots, self._bytes[slots], self._prints(slots))

    def stored(self, block: int, slot: int) -> None:
        """The host tier has in `slot` what device block `block` has."""
        tokens, positions, prints = (part[self._of(block)].copy() for part in self._parts)
        self._host[slot] = (tokens, positions, prints)

    def loading(self, slot: int, block: int) -> None:
        """The device block gets what the host tier has in `slot`."""
        for part, shadow in zip(self._parts, self._host[slot], strict=True):
            part[self._of(block)] = shadow

    def spilled(self, host_slot: int, disk_slot: int) -> None:
        self._disk[disk_slot] = self._host[host_slot]

    def fetched(self, disk_slot: int, host_slot: int) -> None:
        self._host[host_slot] = self._disk[disk_slot]

    @property
    def _parts(self) -> tuple[Slots, Slots, Slots]:
        return self._tokens, self._positions, self._bytes

    def _of(self, block: int) -> slice:
        return slice(block * self.block_tokens, (block + 1) * self.block_tokens)

    def _compare(self, who: str, what: str, slots: Slots, found: Slots, expected: Slots) -> None:
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            at = int(wrong[0])
            raise WrongKV(
                f"{who}, position {at}, in slot {slots[at]} of block {slots[at] // self.block_tokens}: the {what} "
                f"is {found[at]} by the shadow, and should be {expected[at]} ({len(wrong)} such slots)"
            )

    def _slots(self, blocks: Sequence[int], start: int, stop: int) -> Slots:
        positions = np.arange(start, stop)
        firsts = np.asarray(blocks, dtype=np.int64) * self.block_tokens
        return np.asarray(firsts[positions // self.block_tokens] + positions % self.block_tokens)
