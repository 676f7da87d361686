"""In which order replicas get a spec that their engines cannot take while they run. Pure.

One more replica comes up first, with the new spec; then one replica after another is replaced, each once all before it
serve again; then the one more goes. So there are never fewer ready than before. Where there is no room for one more,
they are replaced one by one all the same. What does not come up stops it there: the others go on serving the old spec.

Nothing of it is remembered but which replica is the one more: the rest is seen from what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from tidelane.operator.observation import Observed, Replica
from tidelane.operator.placement import Placements
from tidelane.operator.resources import Service, ServiceSpec
from tidelane.rpc.wire import ExecutionMode, ReplicaSpec

# The schema's bound on numbers of replicas.
_HIGHEST_INDEX: Final = 63


class Standing(Enum):
    """What a replica that has a node does."""

    OUTDATED = auto()  # serves an older spec, and must be replaced for the new one
    SERVING = auto()  # serves what is wanted, or can take it without a pause
    DOWN = auto()  # neither, or it has been told to and is on its way


def wants_surge(standings: Mapping[int, Standing], *, had_surge: bool) -> bool:
    """Whether one more replica is wanted: from the first one outdated until the last one replaced serves."""
    found = standings.values()
    return Standing.OUTDATED in found or (had_surge and Standing.DOWN in found)


def next_to_replace(standings: Mapping[int, Standing], surge: Standing | None) -> int | None:
    """Which replica gets the new spec now; None: none before something else has happened.

    `surge` is how the one more fares; None: there is no room for it.
    """
    settled = Standing.DOWN not in standings.values() and surge in (None, Standing.SERVING)
    outdated = [index for index, standing in standings.items() if standing is Standing.OUTDATED]
    return min(outdated, default=None) if settled else None


@dataclass(frozen=True, slots=True)
class Rollout:
    """`surge` is the index of the one more replica, None: none is wanted. `outdated` are those that wait their turn."""

    surge: int | None
    standings: Mapping[int, Standing]

    @property
    def outdated(self) -> frozenset[int]:
        return frozenset(index for index, standing in self.standings.items() if standing is Standing.OUTDATED)


def rollout(service: Service, spec: ServiceSpec, observed: Observed) -> Rollout:
    """`spec.replicas` is the number wanted."""
    count = spec.replicas or 0
    recorded = service.status.get("surge")
    had_surge = recorded is not None and recorded >= count
    index = recorded if recorded is not None and had_surge else count
    standings = {
        each: _standing(service, spec, each, node, observed)
        for each, node in service.placements.items()
        if each < count
    }
    wanted = wants_surge(standings, had_surge=had_surge) and index <= _HIGHEST_INDEX
    return Rollout(index if wanted else None, standings)


def held_back(
    service: Service, spec: ServiceSpec, made: Rollout, placements: Placements, observed: Observed
) -> frozenset[int]:
    """The replicas that are not to hear of the new spec yet."""
    outdated = made.outdated
    node = None if made.surge is None else placements.owners.get(made.surge)
    surge = None
    if made.surge is not None and node is not None and made.surge not in placements.waiting:
        surge = _standing(service, spec, made.surge, node, observed)
    turn = next_to_replace(made.standings, surge)
    return outdated - {turn}


def _standing(service: Service, spec: ServiceSpec, index: int, node: str, observed: Observed) -> Standing:
    ref = service.replica_ref(index)
    replica = observed.replica(node, ref) if observed.connected(node) else None
    if replica is None or not replica.serves:
        return Standing.DOWN
    if not _takes_another_engine(spec.replica(ref, service.generation), replica):
        return Standing.SERVING
    return Standing.OUTDATED if replica.generation < service.generation else Standing.DOWN


def _takes_another_engine(wanted: ReplicaSpec, replica: Replica) -> bool:
    running = replica.running
    if running is None:
        return False
    disaggregated = [spec.objective.mode is ExecutionMode.DISAGGREGATED for spec in (wanted, running)]
    # An engine refuses to change to or from that mode while it runs.
    return wanted.takes_another_engine(running) or disaggregated[0] != disaggregated[1]
