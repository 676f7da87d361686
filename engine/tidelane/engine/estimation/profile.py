"""The Profile: what was measured of one model on one device, in one small JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.fields import Field, WrongField, parse
from tidelane.engine.estimation.guard import LARGEST_SLOWDOWN, Cell, GuardTable
from tidelane.engine.estimation.passes import PassTimes, RelativeError
from tidelane.engine.whole_file import write_whole

T = TypeVar("T")

VERSION = 1
_NEEDED = frozenset({"version", "key", "measured", "contention", "times", "errors"})
_OPTIONAL = frozenset({"guards"})
# A cell of the guards, in the order of `Cell`.
_CELL = ("new_tokens", "reused_tokens", "batch", "context_tokens")
# One spelling for each number: int() would also take "+1", " 1" and "01".
_UNITS = re.compile(r"[1-9][0-9]{0,8}")


class BadProfile(ValueError):
    """Correct the profile where the message says, or measure again."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is true of. `weights_digest` is that of the model's config, which shapes the computation."""

    weights_digest: str
    device: str
    units: int
    dtype: str
    layers: int


@dataclass(frozen=True, slots=True)
class Profile:
    """`errors` are those of passes held out from the fit, where some were, by phase and units as `times`.

    `guards` are the slowdowns of decode measured beside prefill, cell by cell.
    """

    key: ProfileKey
    measured: date
    times: Mapping[Phase, Mapping[int, PassTimes]]
    contention: Contention = field(default_factory=Contention)
    errors: Mapping[Phase, Mapping[int, RelativeError]] = field(default_factory=dict)
    guards: GuardTable = field(default_factory=GuardTable)

    def estimates(self) -> Estimates:
        return Estimates(self.times, self.contention, guards=self.guards)


def read_profile(path: Path) -> Profile:
    """Raises BadProfile if the file is not a profile of ours, OSError if it cannot be read."""
    try:
        return _profile(parse(str(path), path.read_text(encoding="utf-8")))
    except (WrongField, UnicodeDecodeError) as error:
        where = "" if isinstance(error, WrongField) else f"{path}: is not text in UTF-8: "
        raise BadProfile(f"{where}{error}. Correct it, or delete the file and measure again") from error


def write_profile(path: Path, profile: Profile) -> None:
    write_whole(path, json.dumps(_document(profile), indent=1) + "\n")


def _document(profile: Profile) -> dict[str, Any]:
    document: dict[str, Any] = {
        "version": VERSION,
        "key": asdict(profile.key),
        "measured": profile.measured.isoformat(),
        "contention": _rounded(asdict(profile.contention)),
        "times": {
            phase.value: {str(units): _rounded(asdict(times)) for units, times in sorted(by_units.items())}
            for phase, by_units in profile.times.items()
        },
        "errors": {
            phase.value: {str(units): _rounded(error._asdict()) for units, error in sorted(by_units.items())}
            for phase, by_units in profile.errors.items()
        },
    }
    if profile.guards.seen:
        document["guards"] = {
            str(units): [
                {**dict(zip(_CELL, cell, strict=True)), "slowdown": _rounded(slowdown)}
                for cell, slowdown in sorted(cells.items())
            ]
            for units, cells in sorted(profile.guards.seen.items())
        }
    return document


def _rounded(value: Any) -> Any:
    """Six significant digits: no measurement of time is better, and files that differ can be compared by eye."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _profile(file: Field) -> Profile:
    version = dict(file.items()).get("version")
    # Looked at before all else: a newer file may hold fields that we do not know.
    if version is not None and version.integer(1) > VERSION:
        raise version.wrong(
            f"is {version.value}, newer than {VERSION}, the newest that this Tidelane reads: upgrade it"
        )
    members = file.members(_NEEDED, _OPTIONAL)
    times = members["times"]
    profile = Profile(
        _key(members["key"]),
        _date(members["measured"]),
        {_phase(name, each): _by_units(each, _pass_times) for name, each in times.items()},
        _contention(members["contention"]),
        {_phase(name, each): _by_units(each, _error) for name, each in members["errors"].items()},
        GuardTable(_by_units(members["guards"], _cells)) if "guards" in members else GuardTable(),
    )
    for phase in (Phase.DECODE, Phase.PREFILL):
        if phase not in profile.times:
            raise times.wrong(f"must hold the phase {phase.value}")
    return profile


def _key(at: Field) -> ProfileKey:
    of = at.members(frozenset({"weights_digest", "device", "units", "dtype", "layers"}))
    return ProfileKey(
        of["weights_digest"].text(),
        of["device"].text(),
        of["units"].integer(1),
        of["dtype"].text(),
        of["layers"].integer(1),
    )


def _date(at: Field) -> date:
    try:
        return date.fromisoformat(at.text())
    except ValueError as error:
        raise at.wrong(f"must be a date such as 2026-01-31, not {at.value!r}") from error


def _contention(at: Field) -> Contention:
    of = at.members(frozenset({"decode_slowdown", "prefill_slowdown", "guard"}))
    return Contention(of["decode_slowdown"].number(1), of["prefill_slowdown"].number(1), of["guard"].number(1))


def _phase(name: str, at: Field) -> Phase:
    if name not in {phase.value for phase in Phase}:
        raise at.wrong(f"is not a phase: these are {', '.join(Phase)}")
    return Phase(name)


def _by_units(at: Field, read: Callable[[Field], T]) -> dict[int, T]:
    found = {}
    for name, value in at.items():
        if not _UNITS.fullmatch(name):
            raise value.wrong("must be named by a number of units, at least 1")
        found[int(name)] = read(value)
    if not found:
        raise at.wrong("must hold at least one number of units")
    return found


def _pass_times(at: Field) -> PassTimes:
    of = at.members(frozenset({"knots", "linear_s", "pair_s", "context_s", "sequence_s"}))
    knots, line = of["knots"].elements(), of["linear_s"].elements()
    if not knots:
        raise of["knots"].wrong("must hold at least one number of tokens")
    if len(line) != len(knots):
        raise of["linear_s"].wrong(f"must be as long as knots: {len(knots)}, not {len(line)}")
    for before, after in pairwise(knots):
        if after.integer(1) <= before.integer(1):
            raise after.wrong("must be above the knot before it")
    for before, after in pairwise(line):
        if after.number() < before.number():
            raise after.wrong("must not be below the time before it")
    return PassTimes(
        tuple(knot.integer(1) for knot in knots),
        tuple(each.number() for each in line),
        of["pair_s"].number(),
        of["context_s"].number(),
        of["sequence_s"].number(),
    )


def _cells(at: Field) -> dict[Cell, float]:
    found: dict[Cell, float] = {}
    for each in at.elements():
        of = each.members(frozenset({*_CELL, "slowdown"}))
        new, reused, batch, context = (of[name].integer(1) for name in _CELL)
        slowdown = of["slowdown"].number(1)
        if slowdown > LARGEST_SLOWDOWN:
            raise of["slowdown"].wrong(f"must be at most {LARGEST_SLOWDOWN:g}, not {slowdown:g}")
        found[new, reused, batch, context] = slowdown
    return found


def _error(at: Field) -> RelativeError:
    of = at.members(frozenset({"median", "p90"}))
    return RelativeError(of["median"].number(), of["p90"].number())
