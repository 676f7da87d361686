from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidelane.engine.estimation.estimates import Contention, Phase
from tidelane.engine.estimation.guard import GuardTable
from tidelane.engine.estimation.passes import PassTimes, RelativeError, decode_work
from tidelane.engine.estimation.profile import BadProfile, Profile, ProfileKey, read_profile, write_profile

KEY = ProfileKey("sha256:1234", "NVIDIA H200", 132, "bfloat16", 32)
PROFILE = Profile(
    KEY,
    date(2026, 11, 29),
    {
        Phase.DECODE: {
            16: PassTimes((1, 64), (0.008, 0.0085), 0.0, 5.75e-8, 0.0),
            132: PassTimes((1, 64), (0.0045, 0.005), 0.0, 3.28e-8, 0.0),
        },
        Phase.PREFILL: {132: PassTimes((64, 1024), (0.005, 0.026), 1.31e-9, 0.0, 2e-6)},
    },
    Contention(1.15, 1.05, 1.3),
    {Phase.DECODE: {16: RelativeError(0.01, 0.03)}},
    GuardTable({16: {(2048, 2048, 8, 2048): 1.25}}),
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    return path


def test_what_is_written_is_read_again(written: Path) -> None:
    assert read_profile(written) == PROFILE


def test_estimates_predict_what_the_profile_says(written: Path) -> None:
    estimates = read_profile(written).estimates()
    work = decode_work(32, 32_000)
    assert estimates.seconds(Phase.DECODE, 16, work) == PROFILE.times[Phase.DECODE][16].seconds(work)
    assert estimates.contention == PROFILE.contention
    assert estimates.guarded_decode_s(16, work, (2048, 2048, 8, 2048)) == 1.25 * estimates.seconds(
        Phase.DECODE, 16, work
    )


def test_a_profile_without_guards_is_read_too(written: Path) -> None:
    document = json.loads(written.read_text())
    del document["guards"]
    written.write_text(json.dumps(document))
    assert read_profile(written) == replace(PROFILE, guards=GuardTable())


costs = st.floats(0, 10)


@st.composite
def pass_times(draw: st.DrawFn) -> PassTimes:
    knots = tuple(sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=6))))
    rises = draw(st.lists(costs, min_size=len(knots), max_size=len(knots)))
    return PassTimes(knots, tuple(accumulate(rises)), draw(costs), draw(costs), draw(costs))


by_units = st.dictionaries(st.integers(1, 200), pass_times(), min_size=1, max_size=3)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(by_units, by_units)
def test_any_profile_survives_and_is_rounded_once(
    tmp_path: Path, decode: dict[int, PassTimes], prefill: dict[int, PassTimes]
) -> None:
    path = tmp_path / "any.json"
    write_profile(path, Profile(KEY, date(2026, 1, 2), {Phase.DECODE: decode, Phase.PREFILL: prefill}))
    once = read_profile(path)
    for units, times in decode.items():
        assert once.times[Phase.DECODE][units].linear_s == pytest.approx(times.linear_s, rel=1e-5)
    write_profile(path, once)
    assert read_profile(path) == once


def test_writing_leaves_nothing_else_behind(written: Path) -> None:
    write_profile(written, PROFILE)
    assert [file.name for file in written.parent.iterdir()] == ["profile.json"]


def test_a_write_that_fails_keeps_the_old_profile(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_profile(written, Profile(KEY, date(2027, 1, 1), PROFILE.times))
    assert read_profile(written) == PROFILE
    assert [file.name for file in written.parent.iterdir()] == ["profile.json"]


REMOVED = object()
GUARD = {"new_tokens": 2048, "reused_tokens": 2048, "batch": 8, "context_tokens": 2048, "slowdown": 1.25}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", REMOVED, "version is missing"),
        ("version", 2, "version is 2, newer than 1"),
        ("version", 0, "version must be an integer of at least 1"),
        ("version", "1", "version must be an integer"),
        ("extra", 1, "extra is not a field that we know"),
        ("key", [], "key must be an object"),
        ("key.device", "", "key.device must be a text"),
        ("key.units", 0, "key.units must be an integer of at least 1"),
        ("key.units", True, "key.units must be an integer"),
        ("key.layers", 32.5, "key.layers must be an integer"),
        ("key.weights_digest", None, "key.weights_digest must be a text"),
        ("key.dtype", REMOVED, "key.dtype is missing"),
        ("measured", "yesterday", "measured must be a date"),
        ("measured", 20261129, "measured must be a date"),
        ("contention.guard", 0.9, "contention.guard must be a number of at least 1"),
        ("contention.decode_slowdown", "1.2", "contention.decode_slowdown must be a number"),
        ("contention.prefill_slowdown", REMOVED, "contention.prefill_slowdown is missing"),
        ("times.decode", REMOVED, "times must hold the phase decode"),
        ("times.prefill", {}, "times.prefill must hold at least one number of units"),
        ("times.waiting", {}, "times.waiting is not a phase: these are decode, prefill, fused"),
        ("times.decode.016", {}, "times.decode.016 must be named by a number of units"),
        ("times.decode.0", {}, "times.decode.0 must be named by a number of units"),
        ("times.decode.-4", {}, "times.decode.-4 must be named by a number of units"),
        ("times.decode.16", 3, "times.decode.16 must be an object"),
        ("times.decode.16.knots", [], "times.decode.16.knots must hold at least one"),
        ("times.decode.16.knots", [1, 1], r"times.decode.16.knots\[1\] must be above the knot before"),
        ("times.decode.16.knots", [1], "times.decode.16.linear_s must be as long as knots: 1, not 2"),
        ("times.decode.16.knots", ["1", 64], r"times.decode.16.knots\[0\] must be an integer"),
        ("times.decode.16.linear_s", [0.2, 0.1], r"times.decode.16.linear_s\[1\] must not be below"),
        ("times.decode.16.linear_s", [-0.1, 0.1], r"times.decode.16.linear_s\[0\] must be a number of at least 0"),
        ("times.decode.16.linear_s", [0.1, float("inf")], r"times.decode.16.linear_s\[1\] must be a number"),
        ("times.decode.16.linear_s", 0.1, "times.decode.16.linear_s must be a list"),
        ("times.decode.16.pair_s", float("nan"), "times.decode.16.pair_s must be a number"),
        ("times.decode.16.pair_s", 10**400, "times.decode.16.pair_s must be a number"),
        ("times.decode.16.context_s", None, "times.decode.16.context_s must be a number"),
        ("times.decode.16.sequence_s", REMOVED, "times.decode.16.sequence_s is missing"),
        ("errors.decode.16.p90", -1, "errors.decode.16.p90 must be a number"),
        ("errors.decode.16.mean", 1, "errors.decode.16.mean is not a field"),
        ("errors", None, "errors must be an object"),
        ("guards.16", {}, "guards.16 must be a list"),
        ("guards.16", [{}], r"guards.16\[0\].batch is missing"),
        ("guards.16", [GUARD | {"batch": 0}], r"guards.16\[0\].batch must be an integer of at least 1"),
        ("guards.16", [GUARD | {"slowdown": 0.9}], r"guards.16\[0\].slowdown must be a number of at least 1"),
        ("guards.16", [GUARD | {"slowdown": 2.5}], r"guards.16\[0\].slowdown must be at most 2, not 2.5"),
    ],
)
def test_each_malformed_field_is_named(written: Path, path: str, value: object, says: str) -> None:
    document = copy.deepcopy(json.loads(written.read_text()))
    *parents, name = path.split(".")
    at: dict[str, Any] = document
    for parent in parents:
        at = at[parent]
    if value is REMOVED:
        del at[name]
    else:
        at[name] = value
    written.write_text(json.dumps(document))
    with pytest.raises(BadProfile, match=f"^{written}: {says}"):
        read_profile(written)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"1" * 5000, "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "the file must be an object"),
        (b'{"version": 1, "version": 1}', "version is given twice"),
        (b"\xff\xfe{}", "is not text in UTF-8"),
    ],
)
def test_files_that_are_no_profile_at_all(written: Path, content: bytes, says: str) -> None:
    written.write_bytes(content)
    with pytest.raises(BadProfile, match=f"^{written}: {says}.*measure again"):
        read_profile(written)
