"""Which profile an engine starts from, and how it says no."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from engine.core.models import save
from tidelane.engine.assembly import Parts, load_parts
from tidelane.engine.config import ServeConfig
from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.estimation.profile import Profile, ProfileKey, write_profile
from tidelane.engine.execution.starting import kept_at, profile_key, starting_estimates
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode, Objective

TIMES = {phase: {1: PassTimes((1,), (0.25,)), 2: PassTimes((1,), (0.125,))} for phase in Phase}
CONTENTION = Contention(1.5, 1.25, 1.75)


def two_cores() -> tuple[int, int]:
    """If need be the same one twice."""
    ours = sorted(os.sched_getaffinity(0))
    return ours[0], ours[-1]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    return ServeConfig(
        model=f"file://{save('llama', tmp_path_factory.mktemp('llama'))}",
        model_store=tmp_path_factory.mktemp("store"),
        served_name="tiny",
        objective=Objective(Slo(ttft_s=2, tpot_s=0.2), ExecutionMode.LANES),
        kv_pool_bytes=8 << 20,
        cores=two_cores(),
    )


@pytest.fixture(scope="module")
def parts(config: ServeConfig) -> Iterator[Parts]:
    parts = load_parts(config)
    yield parts
    parts.lanes.close()


@pytest.fixture(scope="module")
def key(parts: Parts) -> ProfileKey:
    return profile_key(parts.loaded.facts, parts.lanes)


def start(parts: Parts, config: ServeConfig) -> Estimates:
    return starting_estimates(parts.model, parts.pool, parts.lanes, parts.loaded.facts, config)


def profile_of(key: ProfileKey) -> Profile:
    return Profile(key, date(2026, 1, 31), TIMES, CONTENTION)


def test_the_key_says_what_times_depend_on(key: ProfileKey, parts: Parts) -> None:
    assert key.weights_digest == parts.loaded.facts.digest
    assert key.device.startswith("cpu: ")
    assert key.device.endswith(f", {len(set(two_cores()))} cores")
    assert (key.units, key.dtype, key.layers) == (2, "float32", 4)


def test_a_profile_that_is_given_is_used(parts: Parts, config: ServeConfig, key: ProfileKey, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile_of(key))
    assert start(parts, replace(config, profile=tmp_path / "p.json")) == Estimates(TIMES, CONTENTION)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("weights_digest", "abc"),
        ("device", "cpu: another, 64 cores"),
        ("units", 64),
        ("dtype", "bfloat16"),
        ("layers", 30),
    ],
)
def test_a_profile_of_another_engine_is_refused_by_what_differs(
    part: str, value: object, parts: Parts, config: ServeConfig, key: ProfileKey, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile_of(replace(key, **{part: value})))  # type: ignore[arg-type]
    with pytest.raises(CannotServe) as refused:
        start(parts, replace(config, profile=path))
    said = str(refused.value)
    ours = getattr(key, part)
    assert f"the profile {path} is of another engine: its {part} is {value}, this engine's {ours}." in said
    assert said.count("this engine's") == 1


def test_a_file_that_is_no_profile_is_refused(parts: Parts, config: ServeConfig, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(CannotServe, match=r"cannot use the profile: .*p\.json: contention is missing"):
        start(parts, replace(config, profile=tmp_path / "p.json"))
    with pytest.raises(CannotServe, match=r"cannot use the profile: .*none\.json"):
        start(parts, replace(config, profile=tmp_path / "none.json"))


def test_what_is_kept_in_the_store_is_found(
    parts: Parts, config: ServeConfig, key: ProfileKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = kept_at(tmp_path, key)
    path.parent.mkdir()
    write_profile(path, profile_of(key))
    assert start(parts, replace(config, model_store=tmp_path)) == Estimates(TIMES, CONTENTION)
    assert caplog.messages == [f"predictions start from the profile {path} of 2026-01-31"]


@pytest.mark.parametrize("device", ["cpu: another", None])
def test_what_is_kept_but_wrong_is_passed_over_and_told(
    device: str | None,
    parts: Parts,
    config: ServeConfig,
    key: ProfileKey,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = kept_at(tmp_path, key)
    path.parent.mkdir()
    if device is None:
        path.write_text("not JSON")
    else:
        write_profile(path, profile_of(replace(key, device=device)))
    estimates = start(parts, replace(config, model_store=tmp_path))
    assert estimates.times != TIMES
    assert str(path) in caplog.text
    assert ("is not JSON" if device is None else "its device is cpu: another") in caplog.text


def test_without_any_a_few_passes_are_timed(parts: Parts, config: ServeConfig) -> None:
    estimates = start(parts, config)
    assert {phase: set(by_units) for phase, by_units in estimates.times.items()} == {
        Phase.DECODE: {1, 2},
        Phase.PREFILL: {1, 2},
        Phase.FUSED: {2},
    }


def test_where_a_profile_is_kept() -> None:
    key = ProfileKey("0123456789abcdef", "cpu: Intel(R) Xeon(R) Processor, 2 cores", 2, "float32", 30)
    assert kept_at(Path("/store"), key) == Path(
        "/store/profiles/0123456789ab-cpu-intel-r-xeon-r-processor-2-cores-2-float32.json"
    )
