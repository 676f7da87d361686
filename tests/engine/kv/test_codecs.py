from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tidelane.engine.kv.codecs import CODECS, Codec, codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout

CPU = torch.device("cpu")
SMOLLM2 = KVLayout(layers=30, heads=3, key_dim=64, value_dim=64, element_bytes=2)
DTYPES = (torch.bfloat16, torch.float32)
LOSSY = tuple(each for each in CODECS if each.name != "raw")
# The axis of [tokens, heads, dim] on which numbers share a scale, keys' and values'; None: each is for itself.
SHARED: dict[str, tuple[int | None, int | None]] = {"bf16": (None, None), "fp8": (2, 2), "int8": (2, 2), "int4": (0, 2)}

every_codec = pytest.mark.parametrize("each", CODECS, ids=lambda each: each.name)
lossy_codec = pytest.mark.parametrize("each", LOSSY, ids=lambda each: each.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def layout(dtype: torch.dtype) -> KVLayout:
    """Keys and values of different width, neither a power of two, and layers that must be filled up."""
    return KVLayout(3, 2, 12, 5, dtype.itemsize)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_blocks(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(count, 16, 2, 12, seed=seed, dtype=dtype), noise(count, 16, 2, 5, seed=seed + 1, dtype=dtype)


def encoded(each: Codec, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    # Not zeros: whatever is left unwritten is found out.
    data = torch.full((len(keys), each.layer_bytes(layout(keys.dtype))), 0xA5, dtype=torch.uint8)
    each.encode(keys, values, data)
    return data


def there_and_back(each: Codec, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    back = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
    each.decode(encoded(each, keys, values), *back)
    return back


def filled_pool(blocks: int, dtype: torch.dtype, seed: int) -> DevicePool:
    """With any bits there are, NaNs of all kinds among them."""
    size = blocks * layout(dtype).block_bytes
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return DevicePool.within(memory, layout(dtype), blocks, dtype)


def by_block(tensor: torch.Tensor) -> torch.Tensor:
    """[slots, heads, dim] as [blocks, tokens, heads, dim]."""
    return tensor.view(-1, 16, *tensor.shape[1:])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return by_block(tensor).contiguous().view(torch.uint8).clone()


@every_dtype
def test_raw_moves_blocks_bit_for_bit_and_touches_nothing_else(dtype: torch.dtype) -> None:
    source, target = filled_pool(7, dtype, seed=1), filled_pool(9, dtype, seed=2)
    raw = codec("raw")
    records = torch.randint(0, 256, (6, 3, raw.layer_bytes(layout(dtype))), dtype=torch.uint8)
    before = records.clone()
    moved = {5: 0, 0: 8, 6: 3, 2: 4}  # of the source to the target, by way of records 1 to 4
    for layer in range(3):
        for read, wrote in ((source.keys, target.keys), (source.values, target.values)):
            assert not torch.equal(bits(read[layer])[list(moved)], bits(wrote[layer])[list(moved.values())])
        was = [bits(side[layer]) for side in (source.keys, source.values, target.keys, target.values)]

        keys, values = (by_block(side[layer])[list(moved)] for side in (source.keys, source.values))
        raw.encode(keys, values, records[1:5, layer])
        keys, values = torch.empty_like(keys), torch.empty_like(values)
        raw.decode(records[1:5, layer], keys, values)
        by_block(target.keys[layer])[list(moved.values())] = keys
        by_block(target.values[layer])[list(moved.values())] = values

        untouched = [block for block in range(9) if block not in moved.values()]
        for at, side in enumerate((source.keys, source.values)):
            assert torch.equal(bits(side[layer]), was[at])
        for at, side in enumerate((target.keys, target.values)):
            assert torch.equal(bits(side[layer])[list(moved.values())], was[at][list(moved)])
            assert torch.equal(bits(side[layer])[untouched], was[2 + at][untouched])
    assert torch.equal(records[[0, 5]], before[[0, 5]])


@every_codec
@every_dtype
def test_a_layer_is_a_piece_of_its_own(each: Codec, dtype: torch.dtype) -> None:
    records = torch.randint(0, 256, (4, 3, each.layer_bytes(layout(dtype))), dtype=torch.uint8)
    before = records.clone()
    keys, values = some_blocks(4, dtype)
    each.encode(keys, values, records[:, 1])
    assert torch.equal(records[:, [0, 2]], before[:, [0, 2]])
    assert torch.equal(records[:, 1], encoded(each, keys, values))
    strided = torch.empty_like(keys), torch.empty_like(values)
    each.decode(records[:, 1], *strided)
    for mine, theirs in zip(strided, there_and_back(each, keys, values), strict=True):
        assert torch.equal(mine, theirs)


@every_codec
@every_dtype
def test_the_source_stays_and_pool_views_will_do(each: Codec, dtype: torch.dtype) -> None:
    """A run of adjacent blocks is read and written where it lies."""
    keys, values = some_blocks(5, dtype)
    before = keys.clone(), values.clone()
    inner = encoded(each, keys[1:4], values[1:4])
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    each.decode(inner, keys[1:4], values[1:4])
    for now, was in zip((keys, values), before, strict=True):
        assert torch.equal(now[[0, 4]], was[[0, 4]])
    expected = there_and_back(each, before[0][1:4], before[1][1:4])
    assert torch.equal(keys[1:4], expected[0])
    assert torch.equal(values[1:4], expected[1])


@every_codec
@every_dtype
def test_equal_blocks_make_equal_bytes_whatever_was_there(each: Codec, dtype: torch.dtype) -> None:
    keys, values = some_blocks(2, dtype)
    data = torch.zeros_like(encoded(each, keys, values))
    each.encode(keys, values, data)
    assert torch.equal(data, encoded(each, keys, values))


@every_codec
@every_dtype
def test_a_block_is_held_the_same_whatever_is_beside_it(each: Codec, dtype: torch.dtype) -> None:
    keys, values = some_blocks(3, dtype)
    keys[0] *= 1000
    together = encoded(each, keys, values)
    for block in range(3):
        alone = encoded(each, keys[block : block + 1], values[block : block + 1])
        assert torch.equal(alone[0], together[block])


def test_sizes() -> None:
    """Of the built-in model: bytes of a layer of a block, 16 tokens of 3 heads, and 64 numbers each side."""
    assert {each.name: each.layer_bytes(SMOLLM2) for each in CODECS} == {
        "raw": 2 * 16 * 3 * 64 * 2,
        "bf16": 2 * 16 * 3 * 64 * 2,
        "fp8": 2 * (16 * 3 * 64 + 16 * 3 * 2),  # codes, and a scale for each head of each token
        "int8": 2 * (16 * 3 * 64 + 2 * 16 * 3 * 2),  # and a zero point
        "int4": (8 * 3 * 64 + 2 * 3 * 64 * 2) + (8 * 3 * 64 + 2 * 16 * 3 * 2),
    }
    assert codec("int8").block_bytes(SMOLLM2) == 30 * 6528


@every_codec
@pytest.mark.parametrize("dims", [(1, 1), (7, 3), (576, 512)])
def test_layers_are_a_whole_number_of_64_bytes(each: Codec, dims: tuple[int, int]) -> None:
    odd = KVLayout(1, 1, *dims, element_bytes=2)
    assert each.layer_bytes(odd) % 64 == 0
    keys, values = noise(2, 16, 1, dims[0]).bfloat16(), noise(2, 16, 1, dims[1]).bfloat16()
    data = torch.empty(2, each.layer_bytes(odd), dtype=torch.uint8)
    each.encode(keys, values, data)
    back = torch.empty_like(keys), torch.empty_like(values)
    each.decode(data, *back)
    torch.testing.assert_close(back, (keys, values), atol=0.3, rtol=0.07)


def test_bytes_on_a_disk_outlive_the_process() -> None:
    """If this fails, a codec writes other bytes than before: it needs another name, or old records are misread."""
    numbers = torch.arange(2 * 16 * 2 * 12) * 7919 % 2003 / 128 - 7
    numbers[:12] = 0
    keys = numbers.view(2, 16, 2, 12).bfloat16()
    values = keys[..., :5] / 8
    assert {
        each.name: hashlib.sha256(encoded(each, keys, values).numpy().tobytes()).hexdigest()[:16] for each in CODECS
    } == {
        "raw": "0c6de44b5c9210eb",
        "bf16": "0c6de44b5c9210eb",  # of bfloat16
        "fp8": "31921e3b8d6c708d",
        "int8": "552295c5241d26e7",
        "int4": "1cd1a78188de9258",
    }


Numbers = npt.NDArray[np.float32]


def any_block() -> st.SearchStrategy[Numbers]:
    """[tokens, heads, dim], of all magnitudes side by side, or of about one."""
    shape = (4, 2, 5)
    wild = arrays(np.float32, shape, elements=st.floats(-(2.0**126), 2.0**126, width=32))
    around_one = arrays(np.float32, shape, elements=st.floats(-1, 1, width=16))
    near = st.builds(
        lambda numbers, offset, exponent: ((numbers + offset) * 2.0**exponent).astype(np.float32),
        around_one,
        st.floats(-100, 100),
        st.integers(-145, 119),
    )
    return wild | near


def allowed(name: str, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """The error that the docstrings allow, before what comes back is rounded to its dtype."""
    if axis is None:
        return x.abs() / 256
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    stored = 1 + 2.0**-7  # bfloat16 rounds up by so much at most
    if name == "fp8":
        scale = (torch.maximum(high, -low) / 448 * stored).clamp_min(2.0**-126)
        return torch.maximum(x.abs() / 16, scale / 1024)
    levels = {"int8": 255, "int4": 15}[name]
    scale = ((high - low + low.abs() / 128 + 2.0**-133) / levels * stored).clamp_min(2.0**-126)
    return (scale / 2).expand_as(x)


@lossy_codec
@given(block=any_block(), dtype=st.sampled_from((*DTYPES, torch.float16)))
@example(block=np.full((4, 2, 5), 2.0**126, np.float32), dtype=torch.bfloat16)
@example(block=np.array([2.0**126, -(2.0**126)] * 20, np.float32).reshape(4, 2, 5), dtype=torch.bfloat16)
@example(block=np.array([2.0**126, -(2.0**126)] * 20, np.float32).reshape(4, 2, 5), dtype=torch.float16)
@example(block=np.array([1e-45, -1e-45] * 20, np.float32).reshape(4, 2, 5), dtype=torch.float32)
def test_errors_stay_within_what_is_promised(each: Codec, block: Numbers, dtype: torch.dtype) -> None:
    largest = 2.0**15 if dtype == torch.float16 else 2.0**126
    numbers = torch.from_numpy(block).clamp(-largest, largest).unsqueeze(0).to(dtype)
    small = KVLayout(1, 2, 5, 5, dtype.itemsize, block_tokens=4)
    data = torch.empty(1, each.layer_bytes(small), dtype=torch.uint8)
    each.encode(numbers, numbers, data)
    back = torch.empty_like(numbers), torch.empty_like(numbers)
    each.decode(data, *back)
    x = numbers[0].double()
    rounded = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}[dtype]
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-133
    for side, axis in zip(back, SHARED[each.name], strict=True):
        limit = allowed(each.name, x, axis)
        error = (side[0].double() - x).abs()
        assert bool((error <= limit * 1.001 + (x.abs() + limit) * rounded + smallest).all())


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
@every_dtype
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.5, 1e5, 2.0**-130, 2.0**126])
def test_equal_numbers_come_back_exact(name: str, dtype: torch.dtype, constant: float) -> None:
    number = torch.tensor(constant).bfloat16().to(dtype)
    keys, values = number.repeat(2, 16, 2, 12), number.repeat(2, 16, 2, 5)
    back = there_and_back(codec(name), keys, values)
    assert torch.equal(back[0], keys)
    assert torch.equal(back[1], values)


@every_dtype
def test_fp8_has_all_the_numbers_of_e4m3(dtype: torch.dtype) -> None:
    numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(dtype).nan_to_num(0)
    # With the largest in each row the scale is 1.
    rows = torch.cat([numbers.view(1, 16, 2, 8), torch.full((1, 16, 2, 4), 448, dtype=dtype)], dim=3)
    back = there_and_back(codec("fp8"), rows, rows[..., 7:])
    assert torch.equal(back[0], rows)
    assert torch.equal(back[1], rows[..., 7:])


@every_codec
def test_zeros_come_back_as_zeros(each: Codec) -> None:
    keys, values = some_blocks(2, torch.bfloat16)
    keys[1], values[1] = 0, 0
    back = there_and_back(each, keys, values)
    assert not back[0][1].any()
    assert not back[1][1].any()


@lossy_codec
@every_dtype
def test_an_outlier_coarsens_only_what_shares_its_scale(each: Codec, dtype: torch.dtype) -> None:
    keys, values = some_blocks(2, dtype)
    calm = there_and_back(each, keys, values)
    keys[0, 3, 1, 3] = values[0, 3, 1, 3] = 1e5
    wild = there_and_back(each, keys, values)
    for at in range(2):
        shares = sharing(each, wild[at], at, (0, 3, 1, 3))
        assert torch.equal(wild[at][~shares], calm[at][~shares])
        assert float(wild[at][0, 3, 1, 3]) == pytest.approx(1e5, rel=0.01)


@lossy_codec
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("token", [0, 11])
def test_nothing_finite_is_made_of_what_is_not(each: Codec, dtype: torch.dtype, bad: float, token: int) -> None:
    keys, values = some_blocks(2, dtype)
    clean = there_and_back(each, keys, values)
    keys[1, token, 0, 2] = values[1, token, 0, 2] = bad
    back = there_and_back(each, keys, values)
    for at in range(2):
        shares = sharing(each, back[at], at, (1, token, 0, 2))
        assert not back[at][shares].isfinite().any()
        assert torch.equal(back[at][~shares], clean[at][~shares])


def sharing(each: Codec, numbers: torch.Tensor, side: int, at: tuple[int, int, int, int]) -> torch.Tensor:
    """Which of `numbers` have the scale of the one at `at`."""
    index: list[Any] = list(at)
    axis = SHARED[each.name][side]
    if axis is not None:
        index[1 + axis] = slice(None)
    shares = torch.zeros_like(numbers, dtype=torch.bool)
    shares[tuple(index)] = True
    return shares


def test_what_was_float32_can_come_back_as_bfloat16() -> None:
    keys, values = some_blocks(2, torch.float32)
    for each in LOSSY:
        exact = there_and_back(each, keys, values)
        short = torch.empty_like(keys, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.bfloat16)
        each.decode(encoded(each, keys, values), *short)
        assert torch.equal(short[0], exact[0].bfloat16())
        assert torch.equal(short[1], exact[1].bfloat16())


def test_codecs_are_found_by_name() -> None:
    assert [codec(each.name) for each in CODECS] == list(CODECS)
    with pytest.raises(ValueError, match="unknown KV codec 'fp4': there are raw, bf16, fp8, int8, int4"):
        codec("fp4")


@every_codec
def test_one_block_is_not_spread_over_many(each: Codec) -> None:
    keys, values = some_blocks(3, torch.bfloat16)
    data = encoded(each, keys, values)
    for wrong in (data[:1], data[:, :-64]):
        with pytest.raises(ValueError, match=f"{each.name}: 3 blocks of torch.bfloat16, keys"):
            each.decode(wrong, keys, values)
        with pytest.raises(ValueError, match=r"are \[\d, \d+\] bytes, not"):
            each.encode(keys, values, wrong)
    with pytest.raises(ValueError, match="and 1 of values"):
        each.encode(keys, values[:1], data)


def test_raw_is_read_as_wide_as_it_was_written() -> None:
    keys, values = some_blocks(2, torch.bfloat16)
    with pytest.raises(ValueError, match=r"are \[\d, \d+\] bytes, not"):
        codec("raw").decode(encoded(codec("raw"), keys, values), keys.float(), values.float())


def test_four_bits_go_in_pairs() -> None:
    with pytest.raises(ValueError, match="5 tokens in a block cannot be packed in 4 bits each"):
        codec("int4").layer_bytes(KVLayout(1, 2, 12, 6, element_bytes=2, block_tokens=5))
