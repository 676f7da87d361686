"""What `tools.kv_quality` compares, KV codecs and schemes not taken; and a way to the lower tiers and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidelane.engine.kv.codecs import CHANNELS, CODECS, TOKENS, Affine, Codec, Part, codec
from tidelane.engine.kv.device import DevicePool


@dataclass(frozen=True, slots=True)
class PerHead:
    """A form that was not taken: one scale for each head of a block, code = x * largest / max |x|."""

    dtype: torch.dtype
    largest: float

    def parts(self, shape: tuple[int, int, int], element_bytes: int) -> tuple[Part, ...]:
        return Part(shape, self.dtype), Part((1, shape[1], 1), torch.float32)

    def encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        codes, scales = parts
        scales.copy_((numbers.abs().amax((TOKENS, CHANNELS), keepdim=True) / self.largest).clamp_min(1e-30))
        scaled = numbers / scales
        codes.copy_(scaled if self.dtype.is_floating_point else scaled.round())

    def decode(self, parts: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        codes, scales = parts
        numbers.copy_(codes.float() * scales)


@dataclass(frozen=True, slots=True)
class Variant:
    """`first_raw`: the first block of each sequence does not go through the codec."""

    codec: Codec
    first_raw: bool = False

    @property
    def name(self) -> str:
        return f"{self.codec.name}, first block raw" if self.first_raw else self.codec.name


def _both(name: str, form: PerHead | Affine) -> Codec:
    return Codec(name, form, form)


TAKEN = tuple(Variant(each) for each in CODECS if each.name != "raw")
BESIDE = (Variant(codec("int4"), first_raw=True),)
NOT_TAKEN = (
    Variant(_both("fp8, by block", PerHead(torch.float8_e4m3fn, 448))),
    Variant(_both("int8, by block", PerHead(torch.int8, 127))),
    Variant(Codec("int8, keys by channel", Affine(8, over=TOKENS), Affine(8, over=CHANNELS))),
    Variant(Codec("int4, keys by token", Affine(4, over=CHANNELS), Affine(4, over=CHANNELS))),
)
VARIANTS = (*TAKEN, *BESIDE, *NOT_TAKEN)


def through(variant: Variant, pool: DevicePool, sequences: Sequence[list[int]]) -> None:
    """Takes the blocks of each sequence out of the pool and puts them back."""
    blocks = [block for sequence in sequences for block in (sequence[1:] if variant.first_raw else sequence)]
    layout = pool.layout
    records = torch.empty(len(blocks), layout.layers, variant.codec.layer_bytes(layout), dtype=torch.uint8)
    sides = [
        tuple(side.view(-1, layout.block_tokens, *side.shape[1:]) for side in layer)
        for layer in zip(pool.keys, pool.values, strict=True)
    ]
    for layer, (keys, values) in enumerate(sides):
        variant.codec.encode(keys[blocks], values[blocks], records[:, layer])
        # What is not put back must not pass for right.
        keys[blocks] = values[blocks] = torch.nan
    for layer, (keys, values) in enumerate(sides):
        back = torch.empty_like(keys[blocks]), torch.empty_like(values[blocks])
        variant.codec.decode(records[:, layer], *back)
        keys[blocks], values[blocks] = back
