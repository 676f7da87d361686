"""Pass times that nobody measured: from a model's shape and a device's facts, operator by operator.

As DuetServe does (arXiv 2511.04791): an operator takes max(F / Pi(S), B / BW(S)), F its arithmetic, B the bytes it
moves, Pi and BW what the device achieves on S of its units. A prior: good enough to start with, simulate and plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidelane.engine.estimation.devices import DeviceFacts
from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.estimation.shapes import ModelShape, kv_bytes_per_token

# Between two powers of 2 a straight line is at most 17 % too high: where one operator alone bends half way.
KNOTS = tuple(2**power for power in range(15))


@dataclass(frozen=True, slots=True)
class _Lane:
    """What a part of a device achieves for one model: flop/s and bytes/s."""

    linear_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    launch_s: float


def prior(shape: ModelShape, device: DeviceFacts, units_rows: Iterable[int]) -> Estimates:
    """Estimates for each of `units_rows` and the whole device. Raises ValueError on units that it does not have."""
    rows = sorted({*units_rows, device.units})
    lanes = {units: _lane(shape, device, units) for units in rows}
    return Estimates(
        {
            Phase.DECODE: {units: _decode(shape, lane) for units, lane in lanes.items()},
            Phase.PREFILL: {units: _prefill(shape, lane) for units, lane in lanes.items()},
            Phase.FUSED: {units: _fused(shape, lane) for units, lane in lanes.items()},
        },
        device.contention,
    )


def _lane(shape: ModelShape, device: DeviceFacts, units: int) -> _Lane:
    arithmetic = device.prefill_speed_at(units)
    flops = device.linear_flops_8bit if shape.eight_bit_matmul else device.linear_flops
    return _Lane(
        flops * arithmetic,
        device.attention_flops * arithmetic,
        device.memory_bytes_per_s * device.decode_speed_at(units),
        device.launch_s,
    )


def _decode(shape: ModelShape, lane: _Lane) -> PassTimes:
    """One token for each sequence, so the head's work, which goes by sequences, is in the line."""
    line = tuple(_layers_s(shape, lane, tokens) + _head_s(shape, lane, tokens) for tokens in KNOTS)
    return PassTimes(KNOTS, line, context_s=_context_s(shape, lane))


def _prefill(shape: ModelShape, lane: _Lane) -> PassTimes:
    """The head's weights are read whatever the sequences; its arithmetic is for each sequence's last token only.

    Reading cached KV for a few new tokens is left out: it would need a term that pairs and tokens do not give.
    """
    line = tuple(_layers_s(shape, lane, tokens) + _head_s(shape, lane, 0) for tokens in KNOTS)
    head_s = 2 * shape.hidden * shape.vocab / lane.linear_flops
    return PassTimes(KNOTS, line, pair_s=_pair_s(shape, lane), sequence_s=head_s)


def _fused(shape: ModelShape, lane: _Lane) -> PassTimes:
    """Attention of both kinds, and the linear layers over all tokens together: weights are read once."""
    prefill = _prefill(shape, lane)
    return PassTimes(prefill.knots, prefill.linear_s, prefill.pair_s, _context_s(shape, lane), prefill.sequence_s)


def _layers_s(shape: ModelShape, lane: _Lane, tokens: int) -> float:
    """All that goes by tokens alone: matrix products and what lies between them, and the launch."""
    products_s = sum(
        max(
            2 * tokens * d_in * d_out / lane.linear_flops,
            (d_in * d_out * shape.weight_bytes_per_parameter + tokens * (d_in + d_out) * shape.dtype_bytes)
            / lane.memory_bytes_per_s,
        )
        for d_in, d_out in shape.layer_products()
    )
    between_s = tokens * _elementwise_bytes(shape) / lane.memory_bytes_per_s
    return lane.launch_s + shape.layers * (products_s + between_s)


def _elementwise_bytes(shape: ModelShape) -> float:
    """Bytes that one token moves in one layer outside the matrix products, if kernels are fused as is usual.

    Twice residual sum and norm (each reads two vectors and writes two), rotary positions (queries and keys, read and
    written), attention's queries in and output out, the MLP's activation.
    """
    norms = 2 * 4 * shape.hidden
    rotary = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    attention = 2 * shape.heads * shape.head_dim
    activation = (3 if shape.gated_mlp else 2) * shape.intermediate
    return (norms + rotary + attention + activation) * shape.dtype_bytes


def _head_s(shape: ModelShape, lane: _Lane, tokens: int) -> float:
    """Logits of `tokens` tokens; the head is hardly ever quantised."""
    products = shape.hidden * shape.vocab
    return max(2 * tokens * products / lane.linear_flops, products * shape.dtype_bytes / lane.memory_bytes_per_s)


def _pair_s(shape: ModelShape, lane: _Lane) -> float:
    """F_attn = 4 h_q d_h for each query and key: pairs count what causal attention computes, no more."""
    return shape.layers * 4 * shape.heads * shape.head_dim / lane.attention_flops


def _context_s(shape: ModelShape, lane: _Lane) -> float:
    """Each cached token is read once for its sequence's one query, and bandwidth is what that takes."""
    return max(kv_bytes_per_token(shape) / lane.memory_bytes_per_s, _pair_s(shape, lane))
