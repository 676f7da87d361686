"""From a model and a GPU to what one engine runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidelane.engine.estimation.devices import DeviceFacts
from tidelane.engine.estimation.estimates import Contention, Estimates
from tidelane.engine.estimation.interpolation import at_units
from tidelane.engine.estimation.profile import Profile
from tidelane.engine.estimation.roofline import prior
from tidelane.engine.estimation.shapes import ModelShape, kv_bytes_per_token, weight_bytes
from tidelane.engine.lanes.partition import Partition, PartitionTable, partition_table
from tidelane.engine.sim.executor import Handover
from tidelane.engine.sim.tiers import NO_TIERS, Tiers, TierSizes

# Of a device's memory, what engines take; the rest is the driver's, and slack. As vLLM's default.
USED_MEMORY = 0.9
ACTIVATION_BYTES = 2e9
# Larger than the real engine's: the same KV in fewer parts, which is quicker to account for.
BLOCK_TOKENS = 64
# Between two GPUs of one machine, as NVLink or a good network card gives to one of them; and what a transfer costs
# however small it is.
HANDOVER_BYTES_PER_S = 50e9
HANDOVER_LATENCY_S = 0.0005


class DoesNotFit(ValueError):
    """The model leaves no room for KV on this device."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one engine runs on: `gpus` devices, cut as `table` says, with room for `blocks` blocks of KV.

    `times` are the truth and `believed` is what policies start from. `handover` is set where decode and prefill are on
    different devices. Each launch costs `overhead_s` of the host's time. `tiers` are what each engine has below the
    device.
    """

    table: PartitionTable
    layers: int
    blocks: int
    block_tokens: int
    times: Estimates
    believed: Estimates
    gpus: int = 1
    overhead_s: float = 0.0
    handover: Handover | None = None
    tiers: Tiers = NO_TIERS


def colocated(
    shape: ModelShape, device: DeviceFacts, *, profile: Estimates | None = None, overhead_s: float = 0.0
) -> Machine:
    """One GPU for both phases. `profile`: measured times, instead of the prior."""
    table = partition_table(device.units, minimum=device.min_units, step=device.unit_step)
    rows = [units for row in table.splits for units in (row.decode_units, row.prefill_units)]
    times = profile or prior(shape, device, rows)
    return Machine(table, shape.layers, _blocks(shape, device), BLOCK_TOKENS, times, times, 1, overhead_s)


def as_profiled(profile: Profile, kv_tokens: int, *, overhead_s: float = 0.0) -> Machine:
    """The machine that a profile was measured on, such as a CPU, with room for `kv_tokens` tokens of KV."""
    times = profile.estimates()
    table = partition_table(profile.key.units)
    return Machine(
        table, profile.key.layers, max(1, kv_tokens // BLOCK_TOKENS), BLOCK_TOKENS, times, times, 1, overhead_s
    )


def in_pairs(one: Machine, shape: ModelShape, *, handover_bytes_per_s: float = HANDOVER_BYTES_PER_S) -> Machine:
    """A machine such as `one` for decode and one for prefill, as the two lanes of one that do not disturb each other.

    The KV pool is that of the decode device: room is reserved there before prefill starts, as Dynamo does. On both
    together, where nothing runs but by which prompts are ordered, a pass takes as long as on one.
    """
    units = one.table.units
    by_phase = {
        phase: {**by_units, 2 * units: at_units(by_units, units)} for phase, by_units in one.times.times.items()
    }
    times = replace(one.times, times=by_phase, contention=Contention(1.0, 1.0, 1.0))
    return replace(
        one,
        table=PartitionTable(2 * units, (Partition(units, units),)),
        times=times,
        believed=times,
        gpus=2 * one.gpus,
        handover=Handover(handover_bytes_per_s, HANDOVER_LATENCY_S, kv_bytes_per_token(shape) / shape.layers),
    )


def in_blocks_of(one: Machine, block_tokens: int) -> Machine:
    """The same room for KV, in other blocks; before it gets any tiers."""
    blocks = max(1, one.blocks * one.block_tokens // block_tokens)
    return replace(one, blocks=blocks, block_tokens=block_tokens)


def with_tiers(one: Machine, shape: ModelShape, sizes: TierSizes) -> Machine:
    """Raises DoesNotFit if they have no room for a block."""
    block_bytes = kv_bytes_per_token(shape) * one.block_tokens
    tiers = sizes.in_blocks(block_bytes)
    if tiers is None:
        raise DoesNotFit(
            f"host memory for KV of {sizes.host_bytes:.0f} bytes has no room for a block of {block_bytes:.0f}"
        )
    return replace(one, tiers=tiers)


def _blocks(shape: ModelShape, device: DeviceFacts) -> int:
    room = device.memory_bytes * USED_MEMORY - weight_bytes(shape) - ACTIVATION_BYTES
    blocks = int(room / (kv_bytes_per_token(shape) * BLOCK_TOKENS))
    if blocks < 1:
        raise DoesNotFit(
            f"weights of {weight_bytes(shape) / 1e9:.0f} GB leave no room for KV in the "
            f"{device.memory_bytes / 1e9:.0f} GB of {device.name}"
        )
    return blocks
