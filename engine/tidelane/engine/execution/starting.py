"""Where an engine's predictions start: from a profile of its model on its device, else from a few passes timed now.

`tidelane profile` keeps what it measures in the model store, under a name made of the profile's key, and every engine
with that key finds it there: PROFILES/<model digest>-<device>-<units>-<dtype>.json.
"""

from __future__ import annotations

import logging
import platform
import re
from dataclasses import fields
from pathlib import Path

from tidelane.engine.config import ServeConfig
from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Estimates
from tidelane.engine.estimation.profile import BadProfile, Profile, ProfileKey, read_profile
from tidelane.engine.execution.calibration import calibrate, warm_up
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.cores import CpuLanes
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import ModelFacts

_log = logging.getLogger(__name__)

PROFILES = "profiles"
# As many hexadecimal digits of a digest as name a model beyond doubt, and can be read.
DIGEST_DIGITS = 12


def starting_estimates(
    model: SlicedModel, pool: DevicePool, lanes: CpuLanes, facts: ModelFacts, config: ServeConfig
) -> Estimates:
    """Also warms up every lane.

    Raises CannotServe if `config.profile` cannot be used, or the model's output is not what its own forward gives.
    """
    key = profile_key(facts, lanes)
    profile = find_profile(config, key)
    if profile is None:
        return calibrate(model, pool, lanes)
    warm_up(model, pool, lanes)
    return profile.estimates()


def find_profile(config: ServeConfig, key: ProfileKey) -> Profile | None:
    """The one that `config` names, else the one kept in the model store. Raises CannotServe if the first is no good."""
    return _kept(kept_at(config.model_store, key), key) if config.profile is None else _given(config.profile, key)


def profile_key(facts: ModelFacts, lanes: CpuLanes) -> ProfileKey:
    return ProfileKey(
        weights_digest=facts.digest,
        device=f"cpu: {cpu_name()}, {len(set(lanes.cores))} cores",
        units=lanes.table.units,
        dtype=str(facts.dtype).removeprefix("torch."),
        layers=facts.layers,
    )


def kept_at(store: Path, key: ProfileKey) -> Path:
    """The file in the model store where a profile with this key is kept."""
    device = re.sub(r"[^a-z0-9]+", "-", key.device.lower()).strip("-")
    return store / PROFILES / f"{key.weights_digest[:DIGEST_DIGITS]}-{device}-{key.units}-{key.dtype}.json"


def _given(path: Path, key: ProfileKey) -> Profile:
    try:
        profile = read_profile(path)
    except (BadProfile, OSError) as error:
        raise CannotServe(f"cannot use the profile: {error}") from error
    if differences := _differences(profile.key, key):
        raise CannotServe(
            f"the profile {path} is of another engine: {differences}. "
            "Measure one with `tidelane profile`, or start without it"
        )
    _log.info("predictions start from the profile %s of %s", path, profile.measured)
    return profile


def _kept(path: Path, key: ProfileKey) -> Profile | None:
    """Nobody asked for it, so an engine starts without it rather than not at all."""
    try:
        profile = read_profile(path)
    except FileNotFoundError:
        return None
    except (BadProfile, OSError) as error:
        _log.warning("starting without the profile that is kept for this engine: %s", error)
        return None
    if differences := _differences(profile.key, key):
        _log.warning("starting without the profile %s, which is of another engine: %s", path, differences)
        return None
    _log.info("predictions start from the profile %s of %s", path, profile.measured)
    return profile


def _differences(theirs: ProfileKey, ours: ProfileKey) -> str:
    """Part by part; empty if there are none."""
    parts = [(field.name, getattr(theirs, field.name), getattr(ours, field.name)) for field in fields(ProfileKey)]
    return "; ".join(f"its {name} is {their}, this engine's {our}" for name, their, our in parts if their != our)


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()  # ARM's kernel names no model
