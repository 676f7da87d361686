"""What the operator sees of nodes and children: the facts that `plan` decides on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, StrEnum

from tidelane.operator.resources import RawObject
from tidelane.rpc.wire import Objective, ReplicaRef, ReplicaSpec


class Phase(StrEnum):
    """What an agent says of a replica."""

    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    BACKING_OFF = "BackingOff"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class TtftParts:
    """TTFT's two parts, each by itself: the wait until prefill began, and the time from there to the first token.

    `queue_s` and `prefill_s` are at the SLO's percentile.
    """

    queue_s: float
    prefill_s: float
    queue_p90_s: float
    prefill_median_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Latency over the engine's last window. `requests` 0: nothing ended in it, and the rest means nothing.

    `ttft_s` and `tpot_s` are at the SLO's percentile. `parts` None: an older engine does not tell them.
    """

    requests: int
    ttft_s: float
    tpot_s: float
    attainment: float
    goodput_rps: float
    ttft_median_s: float = 0.0
    tpot_median_s: float = 0.0
    window_s: float = 0.0
    parts: TtftParts | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """What one request alone on the replica's device would take by its engine's prediction, with so long a prompt."""

    input_tokens: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Lanes:
    decode: int
    prefill: int


class KVPressure(Enum):
    """What lack of room for KV has lately come to, the mildest first."""

    NONE = "EnoughRoom"
    WAITING = "WaitingForRoom"
    PREEMPTING = "Preempting"
    REFUSING = "Refusing"


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as its agent last reported it. `serving_generation` None: it serves nothing yet.

    `idle`: its engine has no request, neither running nor waiting. `objective` is the one last applied, and
    `serves_objective` whether its engine is held to it; None: its agent takes another objective only with another
    generation. `running` is what its engine runs with; None: there is none, or its agent does not tell. `workload` is
    the message of that name, empty where nothing came lately; it is read where a policy asks for it, since it comes
    with each report of each replica.
    """

    ref: ReplicaRef
    generation: int
    serving_generation: int | None
    phase: Phase
    message: str = ""
    host: str = ""
    port: int = 0
    model_loaded: bool = False
    measured: Measured | None = None
    lanes: Lanes | None = None
    kv_pressure: KVPressure | None = None
    idle: bool = False
    reach: Reach | None = None
    objective: Objective | None = None
    serves_objective: bool = True
    running: ReplicaSpec | None = None
    workload: bytes = b""

    def lacks(self, objective: Objective) -> bool:
        """Whether its agent must be told of this one."""
        return self.objective is not None and self.objective != objective

    @property
    def serves(self) -> bool:
        return self.phase is Phase.READY and bool(self.host and self.port)


@dataclass(frozen=True, slots=True)
class Device:
    """`slots` replicas can share it; `held` do."""

    id: str
    healthy: bool = True
    slots: int = 1
    held: int = 0

    @property
    def free(self) -> int:
        return max(0, self.slots - self.held) if self.healthy else 0


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its agent last reported it. `lost_for_s` None: the agent is connected."""

    name: str
    devices: tuple[Device, ...] = ()
    replicas: Mapping[ReplicaRef, Replica] = field(default_factory=dict)
    accepts_replicas: bool = True
    lost_for_s: float | None = None

    @property
    def connected(self) -> bool:
        return self.lost_for_s is None

    def lost(self, lost_for_s: float) -> Node:
        """The same, with its agent out of reach for so long."""
        return replace(self, lost_for_s=lost_for_s)


class RefusalKind(StrEnum):
    NO_ROOM = "NoRoom"
    CANNOT_RUN = "CannotRun"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An agent's answer to one generation of one replica. `expires_in_s` None: it holds for that generation."""

    kind: RefusalKind
    generation: int
    message: str
    expires_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that `plan` may look at besides the service itself.

    `promised` lists, by node, the devices that each replica of another service will take there and that the node does
    not report yet. `children` are the Service of the service's name, whoever owns it, and its EndpointSlices.
    `watching_for_s` is how long the agents have been watched, and `unreached` why they are not connected, by address.
    `calm_since` is that of the last `Decision` on the number of replicas.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    children: tuple[RawObject, ...] = ()
    promised: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    refusals: Mapping[tuple[str, ReplicaRef], Refusal] = field(default_factory=dict)
    watching_for_s: float = 0.0
    calm_since: datetime | None = None
    unreached: Mapping[str, str] = field(default_factory=dict)

    def lost_for_s(self, node_name: str) -> float:
        """How long its agent has been out of reach; 0: it is connected. A node never heard of counts from the start."""
        node = self.nodes.get(node_name)
        return self.watching_for_s if node is None else node.lost_for_s or 0.0

    def connected(self, node_name: str) -> Node | None:
        node = self.nodes.get(node_name)
        return node if node is not None and node.connected else None

    def replica(self, node_name: str, ref: ReplicaRef) -> Replica | None:
        node = self.nodes.get(node_name)
        return node.replicas.get(ref) if node else None


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the operator waits for what.

    After `unreachable_s` without its agent a replica no longer counts as ready; after `move_s` it is placed elsewhere;
    after `forget_s` a deletion no longer waits for it. A service gets one replica fewer once that would have done for
    `stabilisation_s`. `recheck_s` is a safety net under the events that tell of room.
    """

    unreachable_s: float = 10.0
    move_s: float = 60.0
    forget_s: float = 300.0
    drain_s: float = 30.0
    figures_s: float = 10.0
    refusal_s: float = 15.0
    recheck_s: float = 60.0
    stabilisation_s: float = 300.0
