"""What a sequence that streams holds on the device: a fixed run of blocks, whatever its length (docs/adr/0034)."""

from __future__ import annotations

from dataclasses import dataclass

# A part is no larger: it is 1,024 tokens then, and copying it takes far longer than beginning to.
LARGEST_PART_BLOCKS = 64
# Of the pool, the most that a stream takes of it.
POOL_PART = 4
SMALLEST_RUN_BLOCKS = 4  # two parts of a block, and two to compute in


@dataclass(frozen=True, slots=True)
class StreamRun:
    """Adjacent blocks of the pool, which are one sequence's for as long as it streams: two staging buffers of
    `part_blocks` each from block `first` on, then `own_blocks` for what is being computed."""

    first: int
    part_blocks: int
    own_blocks: int

    @staticmethod
    def at_end_of(blocks: int) -> StreamRun | None:
        """Of a pool of so many: its last ones, where a run hinders runs that grow the least. None: it is too small."""
        most = blocks // POOL_PART
        if most < SMALLEST_RUN_BLOCKS:
            return None
        part = min(LARGEST_PART_BLOCKS, (most - 1) // 3)
        return StreamRun(blocks - (3 * part + 1), part, part + 1)

    @property
    def count(self) -> int:
        return 2 * self.part_blocks + self.own_blocks

    @property
    def first_own(self) -> int:
        return self.first + 2 * self.part_blocks

    @property
    def pass_blocks(self) -> int:
        """What a pass can take, whatever lies on the device before it: less than a block."""
        return self.own_blocks - 1
