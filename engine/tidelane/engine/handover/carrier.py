"""How KV gets from one side's pool into the other's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from tidelane.engine.kv.device import DevicePool


class Carrier(Protocol):
    """Shared memory on one machine; a network card's remote writes (nixl) would be another.

    One-sided: the decode side takes no part. It leaves the blocks alone until the completion comes, which is sent after
    `arrived`; or until whoever could still write to them is known to be dead.
    """

    def send(self, layer: int, blocks: Iterable[int]) -> None:
        """Begin to copy what `layer` has in `blocks` to the same blocks of the other pool."""
        ...

    def arrived(self) -> None:
        """Returns once all that was sent is there."""
        ...


class SharedMemoryCarrier:
    """Both pools are mapped here: a copy, done when `send` returns."""

    def __init__(self, source: DevicePool, target: DevicePool) -> None:
        self._pairs = [
            ((source.keys[layer], target.keys[layer]), (source.values[layer], target.values[layer]))
            for layer in range(source.layout.layers)
        ]
        self._block_tokens = source.layout.block_tokens

    def send(self, layer: int, blocks: Iterable[int]) -> None:
        for first, last in _runs(blocks):
            slots = slice(first * self._block_tokens, last * self._block_tokens)
            for source, target in self._pairs[layer]:
                target[slots].copy_(source[slots])

    def arrived(self) -> None:
        pass


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Adjacent blocks as [first, last), which are one copy."""
    first = last = None
    for block in sorted(blocks):
        if first is not None and last == block:
            last = block + 1
            continue
        if first is not None and last is not None:
            yield first, last
        first, last = block, block + 1
    if first is not None and last is not None:
        yield first, last
