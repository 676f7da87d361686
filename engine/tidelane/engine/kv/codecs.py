"""How KV blocks are held below the device tier: as they are (raw), or in fewer bits (bf16, fp8, int8, int4).

There a block is one *record*: its layers one after another, `Codec.layer_bytes` each, so that layer l of a block is one
piece at l * layer_bytes. Within a layer come the parts of the keys, then those of the values, then zeros up to a whole
number of 64 bytes; a part is one array of codes, of scales or of zero points.

A scale belongs to one block, and there to one head of one token (one head's channel, for int4's keys): a scale that
outlived its block would be wrong for whoever shares the prefix. What was measured of quality and speed is in
docs/measurements/kv-quality.md. Plain torch operations, so they should run on a GPU too, where none has been run yet.

A NaN or an infinity leaves no finite number among those that share its scale, and changes no others: nothing finite is
ever made of it. Magnitudes up to 2^126 stay finite (in float16 2^15); larger ones may cost their group the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from tidelane.engine.kv.layout import KVLayout

# Records lie side by side: this keeps the views into each of them, and vector loads, aligned.
LAYER_ALIGNMENT_BYTES: Final = 64
# Axes of [blocks, tokens, heads, dim]. Numbers that differ only there share a scale.
TOKENS: Final = 1
CHANNELS: Final = 3
# No scale is smaller, so that equal numbers have the code 0 and not that of 0 / 0.
_SMALLEST_SCALE: Final = torch.finfo(torch.bfloat16).tiny
_FP8_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Part:
    """[blocks, *shape] in the records of some blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Form(Protocol):
    """How the keys of a layer are held, or its values: `numbers` [blocks, tokens, heads, dim] as parts, in order."""

    def parts(self, shape: tuple[int, int, int], element_bytes: int) -> tuple[Part, ...]:
        """`shape` is [tokens, heads, dim]."""

    def encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None: ...

    def decode(self, parts: Sequence[torch.Tensor], numbers: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Raw:
    """Bit for bit."""

    def parts(self, shape: tuple[int, int, int], element_bytes: int) -> tuple[Part, ...]:
        tokens, heads, dim = shape
        return (Part((tokens, heads, dim * element_bytes), torch.uint8),)

    def encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        parts[0].copy_(numbers.view(torch.uint8))

    def decode(self, parts: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        numbers.view(torch.uint8).copy_(parts[0])


@dataclass(frozen=True, slots=True)
class Rounded:
    """To bfloat16, the nearest: |x' - x| <= |x| / 256."""

    def parts(self, shape: tuple[int, int, int], element_bytes: int) -> tuple[Part, ...]:
        return (Part(shape, torch.bfloat16),)

    def encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        parts[0].copy_(numbers)

    def decode(self, parts: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        numbers.copy_(parts[0])


@dataclass(frozen=True, slots=True)
class Float8:
    """e4m3 with a scale s = max |x| / 448 for each head of each token: code = e4m3(x / s), x' = code * s.

    |x' - x| <= max(|x| / 16, s / 1024): half the spacing of three bits of mantissa, and of the subnormals.
    """

    def parts(self, shape: tuple[int, int, int], element_bytes: int) -> tuple[Part, ...]:
        return Part(shape, torch.uint8), Part(_grouped(shape, CHANNELS), torch.bfloat16)

    def encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        codes, scales = parts
        x = numbers.float()
        largest = torch.maximum(x.amax(CHANNELS, keepdim=True), -x.amin(CHANNELS, keepdim=True))
        scales.copy_(_at_least((largest / _FP8_LARGEST).clamp_min(_SMALLEST_SCALE)))
        codes.copy_((x / scales.float()).to(torch.float8_e4m3fn).view(torch.uint8))

    def decode(self, parts: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        codes, scales = parts
        # Shifted to where float16 has them, sign apart, the bits of e4m3 read as its value / 256. On a CPU that takes
        # an eighth of the time of torch's own conversion. It knows no NaN, but their scales are NaN.
        halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)
        numbers.copy_(halves.float().mul_(scales.float() * 256))


@dataclass(frozen=True, slots=True)
class Affine:
    """Integers of `bits` with a zero point z and a scale s for each group of numbers that differ only on axis `over`:

        z = min x,   s = (max x - z) / (2^bits - 1),   code = round((x - z) / s),   x' = code * s + z

    |x' - x| <= s / 2, and a group of equal numbers comes back exact, if bfloat16 can hold them. z and s are bfloat16,
    which has the range of what they describe; z is rounded down, then s up, so that the codes always cover the group.
    For float32 numbers far from zero that widens s: z may lie |min x| / 128 below them.
    """

    bits: int
    over: int

    def parts(self, shape: tuple[int, int, int], element_bytes: int) -> tuple[Part, ...]:
        tokens, heads, dim = shape
        if tokens * self.bits % 8:
            raise ValueError(f"{tokens} tokens in a block cannot be packed in {self.bits} bits each")
        group = Part(_grouped(shape, self.over), torch.bfloat16)
        return Part((tokens * self.bits // 8, heads, dim), torch.uint8), group, group

    def encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        packed, zeros, scales = parts
        x = numbers.float()
        zeros.copy_(-_at_least(-x.amin(self.over, keepdim=True)))
        zero, largest = zeros.float(), x.amax(self.over, keepdim=True)
        scales.copy_(_at_least(((largest - zero) / (2**self.bits - 1)).clamp_min(_SMALLEST_SCALE)))
        codes = (x - zero).div_(scales.float()).round_().to(torch.uint8)
        if self.bits == 4:
            first, second = codes.chunk(2, dim=TOKENS)
            # A NaN's code is anything: it must not reach into the number that it shares a byte with.
            codes = first.bitwise_and_(15).bitwise_or_(second << 4)
        packed.copy_(codes)

    def decode(self, parts: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        packed, zeros, scales = parts
        codes = torch.cat([packed & 15, packed >> 4], dim=TOKENS) if self.bits == 4 else packed
        numbers.copy_(codes.float().mul_(scales.float()).add_(zeros.float()))


@dataclass(frozen=True, slots=True)
class Codec:
    """Keys [blocks, tokens, heads, key_dim] and values [blocks, tokens, heads, value_dim] of a layer, and their bytes.

    `data` is [blocks, layer_bytes], uint8: for layer l of records [blocks, layers, layer_bytes], `records[:, l]`. Of
    each tensor only the last axis must be contiguous. Records outlive the process, and their namespace holds `name`: a
    codec that writes other bytes needs another name.
    """

    name: str
    keys: Form
    values: Form

    def layer_bytes(self, layout: KVLayout) -> int:
        """Of one layer of one block."""
        rows, element_bytes = (layout.block_tokens, layout.heads), layout.element_bytes
        of_keys = self.keys.parts((*rows, layout.key_dim), element_bytes)
        of_values = self.values.parts((*rows, layout.value_dim), element_bytes)
        return _aligned_bytes((*of_keys, *of_values))

    def block_bytes(self, layout: KVLayout) -> int:
        """Of one record."""
        return layout.layers * self.layer_bytes(layout)

    def encode(self, keys: torch.Tensor, values: torch.Tensor, data: torch.Tensor) -> None:
        """Writes all of `data`: equal blocks make equal bytes."""
        for_keys, for_values, padding = self._views(data, keys, values)
        self.keys.encode(keys, for_keys)
        self.values.encode(values, for_values)
        padding.zero_()

    def decode(self, data: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Into `keys` and `values`, which may have another dtype than was encoded, except in raw."""
        of_keys, of_values, _ = self._views(data, keys, values)
        self.keys.decode(of_keys, keys)
        self.values.decode(of_values, values)

    def _views(
        self, data: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """The parts of the keys, those of the values, and what fills up the layer."""
        blocks, *shape = keys.shape
        of_keys = self.keys.parts(_block_shape(keys), keys.element_size())
        of_values = self.values.parts(_block_shape(values), values.element_size())
        parts = (*of_keys, *of_values)
        wanted = [blocks, _aligned_bytes(parts)]
        # Said here, since copying would spread one block over many.
        if list(data.shape) != wanted or len(values) != blocks:
            raise ValueError(
                f"{self.name}: {blocks} blocks of {keys.dtype}, keys {shape} and {len(values)} of values "
                f"{list(values.shape[1:])}, are {wanted} bytes, not {list(data.shape)}"
            )
        sizes = [part.size_bytes for part in parts]
        *pieces, padding = torch.split(data, [*sizes, wanted[1] - sum(sizes)], dim=1)
        views = [piece.view(part.dtype).view(blocks, *part.shape) for piece, part in zip(pieces, parts, strict=True)]
        return views[: len(of_keys)], views[len(of_keys) :], padding


# fp8 and int8 give every token a scale of its own, as LMDeploy does: the first tokens of a text, which all later ones
# attend to, have keys and values of another size than the rest. int4 has no codes to spare for the few channels in
# which keys are large, so it follows KIVI (arXiv 2402.02750): keys by channel, over a block's tokens; values by token.
RAW: Final = Codec("raw", Raw(), Raw())
CODECS: Final = (
    RAW,
    Codec("bf16", Rounded(), Rounded()),
    Codec("fp8", Float8(), Float8()),
    Codec("int8", Affine(8, over=CHANNELS), Affine(8, over=CHANNELS)),
    Codec("int4", Affine(4, over=TOKENS), Affine(4, over=CHANNELS)),
)


def codec(name: str) -> Codec:
    """Raises ValueError for a name that is none."""
    for each in CODECS:
        if each.name == name:
            return each
    raise ValueError(f"unknown KV codec {name!r}: there are {', '.join(each.name for each in CODECS)}")


def _block_shape(numbers: torch.Tensor) -> tuple[int, int, int]:
    _, tokens, heads, dim = numbers.shape
    return tokens, heads, dim


def _grouped(shape: tuple[int, int, int], over: int) -> tuple[int, ...]:
    """The shape of one number for each group."""
    return tuple(1 if axis == over else size for axis, size in enumerate(shape, start=1))


def _aligned_bytes(parts: Sequence[Part]) -> int:
    size = sum(part.size_bytes for part in parts)
    return -(-size // LAYER_ALIGNMENT_BYTES) * LAYER_ALIGNMENT_BYTES


def _at_least(x: torch.Tensor) -> torch.Tensor:
    """`x` in bfloat16, rounded up."""
    nearest = x.bfloat16()
    above = torch.nextafter(nearest, nearest.new_full((), math.inf))
    return torch.where(nearest < x, above, nearest)
