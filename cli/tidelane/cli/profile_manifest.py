"""`tidelane profile-manifest`: a measured profile as a ModelProfile for the cluster."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:  # of the engine's part, needed only once there is something to print
    from tidelane.engine.estimation.profile import Profile

_DESCRIPTION = """Prints what `tidelane profile` measured as a ModelProfile manifest, for kubectl apply. It reads and
writes no cluster."""
_GROUP: Final = "tidelane.dev/v1alpha1"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_DIGITS_IN_NAME: Final = 12
_LONGEST_NAME: Final = 253


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile-manifest", help="print a measured profile as a ModelProfile manifest", description=_DESCRIPTION
    )
    parser.add_argument("profile", type=Path, metavar="FILE", help="a profile, as `tidelane profile` writes it")
    parser.add_argument("--name", help="of the ModelProfile (made of device, units, dtype and the model's digest)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tidelane.engine.estimation.profile import BadProfile, read_profile

    try:
        profile = read_profile(args.profile)
    except (BadProfile, OSError) as error:
        print(f"tidelane profile-manifest: {error}", file=sys.stderr)
        return 2
    name = args.name or name_of(profile)
    if not _NAME.fullmatch(name):
        print(
            f"tidelane profile-manifest: --name {name!r}: use lower-case letters, digits, - and ., at most "
            f"{_LONGEST_NAME} characters",
            file=sys.stderr,
        )
        return 2
    yaml.safe_dump(manifest(profile, name), sys.stdout, sort_keys=False)
    return 0


def name_of(profile: Profile) -> str:
    key = profile.key
    digest = key.weights_digest.rpartition(":")[2][:_DIGITS_IN_NAME]
    words = re.sub(r"[^a-z0-9]+", "-", f"{key.device} {key.units} {key.dtype} {digest}".lower())
    return words.strip("-")[-_LONGEST_NAME:].strip("-")


def manifest(profile: Profile, name: str) -> dict[str, Any]:
    """Units, phases and cells ascending, so that two prints of one profile are equal."""
    key, contention = profile.key, profile.contention
    spec: dict[str, Any] = {
        "weightsDigest": key.weights_digest,
        "device": key.device,
        "units": key.units,
        "dtype": key.dtype,
        "layers": key.layers,
        "measured": profile.measured.isoformat(),
        "contention": {
            "decodeSlowdown": _factor(contention.decode_slowdown),
            "prefillSlowdown": _factor(contention.prefill_slowdown),
            "guard": _factor(contention.guard),
        },
        "times": _times(profile),
    }
    guards = [
        {
            "units": units,
            "newTokens": new,
            "reusedTokens": reused,
            "batch": batch,
            "contextTokens": context,
            "slowdown": _factor(slowdown),
        }
        for units, cells in sorted(profile.guards.seen.items())
        for (new, reused, batch, context), slowdown in sorted(cells.items())
    ]
    return {
        "apiVersion": _GROUP,
        "kind": "ModelProfile",
        "metadata": {"name": name},
        "spec": {**spec, "guards": guards} if guards else spec,
    }


def _times(profile: Profile) -> list[dict[str, Any]]:
    found = []
    for phase, by_units in sorted(profile.times.items()):
        for units, times in sorted(by_units.items()):
            error = profile.errors.get(phase, {}).get(units)
            shown = {
                "phase": phase.value,
                "units": units,
                "knots": list(times.knots),
                "linearSeconds": [_number(each) for each in times.linear_s],
                "pairSeconds": _number(times.pair_s),
                "contextSeconds": _number(times.context_s),
                "sequenceSeconds": _number(times.sequence_s),
            }
            held_out = {"error": {"median": _number(error.median), "p90": _number(error.p90)}} if error else {}
            found.append(shown | held_out)
    return found


def _number(value: float) -> str:
    """Six significant digits, as in the profile's file."""
    return f"{value:.6g}"


def _factor(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")
