"""How long a team's threads spin at a barrier before they sleep. Must be settled before torch is imported."""

from __future__ import annotations

from collections.abc import MutableMapping

# A decode step passes some 400 barriers, tens of microseconds apart. libgomp's own limit keeps a thread spinning for
# many milliseconds: beside any other busy process it then spins away the very core that its partner waits for, and
# steps take ten times as long. This many turns (about half a millisecond) bridge the gaps of a step and little more.
SPIN_TURNS = "10000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Set the limit in this process's environment, unless the user has chosen one."""
    environment.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)
