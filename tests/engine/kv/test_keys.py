"""Names of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.kv.keys import KEY_BYTES, TokenNames, chain, namespace, root
from tidelane.engine.request import Request, Sampling

SPACE = namespace("weights", "float32")


def request(salt: str = "") -> Request:
    return Request("r", (), 1, Sampling(seed=0), arrival_s=0.0, cache_salt=salt)


def test_a_name_depends_on_every_token_before_it() -> None:
    start = root(SPACE, "")
    keys = chain(start, range(12), 4)
    assert len({*keys, start}) == 4
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert chain(start, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99], 4)[:2] == keys[:2]
    assert not set(chain(start, [99, *range(1, 12)], 4)) & set(keys)
    # The same tokens, cut elsewhere.
    assert chain(keys[0], range(4, 12), 4) == keys[1:]


def test_names_are_the_same_in_every_process() -> None:
    assert chain(root(SPACE, "tenant"), range(4), 4)[0].hex() == "5cb2f87d423f1f2c641765a9d7703c5e"


def test_another_namespace_salt_or_cut_of_the_parts_is_another_name() -> None:
    spaces = [namespace("ab", "c"), namespace("a", "bc"), namespace("abc"), namespace("c", "ab")]
    roots = {root(space, salt) for space in spaces for salt in ("", "a", "b", "ab")}
    assert len(roots) == len(spaces) * 4


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_keys_grow_with_the_tokens_and_never_change(tokens: list[int], steps: list[int]) -> None:
    names = TokenNames(SPACE, 4)
    keys: list[bytes] = []
    whole = len(tokens) // 4
    for blocks in sorted(min(step, whole) for step in steps):
        names.extend(keys, request(), tokens, blocks)
        assert keys == chain(root(SPACE, ""), tokens[: 4 * blocks], 4)
    names.extend(keys, request(), tokens, 0)
    other: list[bytes] = []
    names.extend(other, request("salt"), tokens, whole)
    assert not set(other) & set(keys)
