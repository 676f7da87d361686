"""How a device can be split: a small table of partitions, made once, from which the scheduler picks rows.

A partition gives the first `decode_units` compute units (SMs of a GPU, cores of a CPU) to decode and the last
`prefill_units` to prefill. Where both are the whole device, one phase at a time uses it, or both in one fused batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    decode_units: int
    prefill_units: int


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """The rows of one device: `splits` by rising decode share, and `whole`."""

    units: int
    splits: tuple[Partition, ...]

    @property
    def whole(self) -> Partition:
        return Partition(self.units, self.units)


# MuxWise finds six or seven partitions enough (arXiv 2504.14489); each costs memory for its workers or graphs.
MAX_SPLITS = 7


def partition_table(units: int, *, minimum: int = 1, step: int = 1, most: int = MAX_SPLITS) -> PartitionTable:
    """At most `most` splits of `units`, evenly spread, each side a multiple of `step` and at least `minimum` units.

    A device too small to be split has none. Units that the step leaves over go to prefill.
    """
    if units < 1 or minimum < 1 or step < 1:
        raise ValueError("units, minimum and step must be at least 1")
    first = -(-minimum // step) * step
    sizes = [n for n in range(first, units, step) if units - n >= minimum]
    if len(sizes) > most:
        sizes = [sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)]
    return PartitionTable(units, tuple(Partition(n, units - n) for n in sizes))


def sm_group(capability: tuple[int, int]) -> int:
    """How many SMs a green context is made up of at the least, by the GPU's compute capability (CUDA Driver API).

    A lane is a union of such groups. Below 9.0 the driver would also take steps of half a group; but only groups of
    one split are sure to be disjoint, and that split cannot make them smaller.
    """
    major, _ = capability
    if major < 7:
        raise ValueError(f"compute capability {major}.x has no green contexts")
    return {7: 2, 8: 4}.get(major, 8)


def sm_table(units: int, capability: tuple[int, int]) -> PartitionTable:
    """How a GPU of `units` SMs can be split."""
    group = sm_group(capability)
    return partition_table(units, minimum=group, step=group)
