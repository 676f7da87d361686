"""A profile as a ModelProfile: what the schema takes, number by number."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml

from tidelane.cli import main
from tidelane.engine.estimation.estimates import Contention, Phase
from tidelane.engine.estimation.guard import GuardTable
from tidelane.engine.estimation.passes import PassTimes, RelativeError
from tidelane.engine.estimation.profile import Profile, ProfileKey, write_profile
from tidelane.operator.crd import PROFILE_KIND
from tidelane.operator.validation import Schemas

PROFILE = Profile(
    ProfileKey("sha256:1234567890abcdef", "NVIDIA H200", 132, "bfloat16", 32),
    date(2026, 11, 29),
    {
        Phase.PREFILL: {132: PassTimes((64, 1024), (0.005, 0.026), 1.31e-9, 0.0, 2e-6)},
        Phase.DECODE: {
            132: PassTimes((1, 64), (0.0045, 0.005), 0.0, 3.28e-8, 0.0),
            16: PassTimes((1, 64), (0.008, 0.0085), 0.0, 5.75e-8, 0.0),
        },
    },
    Contention(1.15, 1.0, 1.3),
    {Phase.DECODE: {16: RelativeError(0.01, 0.03)}},
    GuardTable({16: {(2048, 2048, 8, 2048): 1.25}}),
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    return path


def test_what_is_printed_is_what_the_cluster_takes(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile-manifest", str(written)]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert Schemas().of(PROFILE_KIND).problems(manifest) == ()
    assert manifest["metadata"]["name"] == "nvidia-h200-132-bfloat16-1234567890ab"
    spec = manifest["spec"]
    assert spec["contention"] == {"decodeSlowdown": "1.15", "prefillSlowdown": "1", "guard": "1.3"}
    assert [(each["phase"], each["units"]) for each in spec["times"]] == [
        ("decode", 16),
        ("decode", 132),
        ("prefill", 132),
    ]
    assert spec["times"][0] == {
        "phase": "decode",
        "units": 16,
        "knots": [1, 64],
        "linearSeconds": ["0.008", "0.0085"],
        "pairSeconds": "0",
        "contextSeconds": "5.75e-08",
        "sequenceSeconds": "0",
        "error": {"median": "0.01", "p90": "0.03"},
    }
    assert spec["guards"] == [
        {"units": 16, "newTokens": 2048, "reusedTokens": 2048, "batch": 8, "contextTokens": 2048, "slowdown": "1.25"}
    ]


def test_what_is_no_profile_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main.main(["profile-manifest", str(tmp_path / "x.json")]) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith(f"tidelane profile-manifest: {tmp_path}/x.json: contention is missing: add it")


def test_a_name_that_no_object_can_have(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile-manifest", str(written), "--name", "My Profile"]) == 2
    assert "--name 'My Profile': use lower-case letters" in capsys.readouterr().err
