"""What to do next with one replica, and what to call its state. Pure: (wanted, engine, failures, now) -> action."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidelane.agent.backoff import Failures
from tidelane.agent.claims import Claim
from tidelane.rpc.node_agent_pb2 import ReplicaStatus
from tidelane.rpc.wire import ReplicaSpec

Phase = ReplicaStatus.Phase

# The engine's "it can never run as asked" (EX_CONFIG in sysexits.h).
EXIT_CANNOT_RUN = 78


@dataclass(frozen=True, slots=True)
class Limits:
    """How long what may take.

    `first_word_s` covers starting Python and importing torch, until the control socket answers; loading a model may
    take as long as it likes, as long as the engine goes on saying so every `silence_s`.
    """

    first_word_s: float = 180.0
    silence_s: float = 30.0
    replace_drain_s: float = 30.0
    exit_grace_s: float = 5.0
    # An engine's HTTP process ends its streams and itself within 2 s of its engine's death.
    front_grace_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Ending:
    """The replica is not to run: drain until `drain_by_s`. `forget`: it was removed; else the agent only stops it."""

    drain_by_s: float
    forget: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    spec: ReplicaSpec
    claim: Claim
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of a living engine process.

    `spec` and `claim` are those it runs with; `spec` follows an objective once the engine has taken it.
    `quiet_s` is how long it has said nothing, `heard` whether it ever spoke. `objective_in_force` says whether it has
    taken the objective wanted now, `objective_refused` that it cannot without starting anew.
    """

    spec: ReplicaSpec
    claim: Claim
    heard: bool = False
    ready: bool = False
    quiet_s: float = 0.0
    objective_in_force: bool = True
    objective_refused: bool = False
    drain_by_s: float | None = None
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    pass


@dataclass(frozen=True, slots=True)
class Drain:
    by_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    reason: str


@dataclass(frozen=True, slots=True)
class SendObjective:
    pass


@dataclass(frozen=True, slots=True)
class End:
    """No engine is left and none is wanted."""


@dataclass(frozen=True, slots=True)
class Wait:
    until_s: float | None = None


Action = Launch | Drain | Kill | SendObjective | End | Wait


@dataclass(frozen=True, slots=True)
class Situation:
    wanted: Wanted
    engine: EngineView | None = None
    failures: Failures = field(default_factory=Failures)
    # The generation whose engine said that it can never run; None: none did.
    failed_generation: int | None = None


def next_action(now: Situation, now_s: float, limits: Limits) -> Action:
    """The one thing to do now; called again after it is done and after every event."""
    wanted, engine = now.wanted, now.engine
    if engine is None:
        return _without_engine(now, now_s)
    if engine.killed:
        return Wait()
    if engine.drain_by_s is not None:
        kill_at_s = engine.drain_by_s + limits.exit_grace_s
        if wanted.ending and wanted.ending.drain_by_s < engine.drain_by_s:
            return Drain(wanted.ending.drain_by_s, "shorter deadline")
        return Wait(kill_at_s) if now_s < kill_at_s else Kill("did not end after draining")
    if wanted.ending:
        return Drain(wanted.ending.drain_by_s, "removed" if wanted.ending.forget else "agent stops")
    silence_limit_s = limits.silence_s if engine.heard else limits.first_word_s
    if engine.quiet_s >= silence_limit_s:
        return Kill(f"said nothing for {silence_limit_s:.0f} s")
    if must_replace(engine, wanted):
        return Drain(now_s + limits.replace_drain_s, f"generation {wanted.spec.generation}")
    if engine.heard and not engine.objective_in_force:
        return SendObjective()
    return Wait()


def _without_engine(now: Situation, now_s: float) -> Action:
    if now.wanted.ending:
        return End()
    if now.failed_generation == now.wanted.spec.generation:
        return Wait()
    if now_s < now.failures.restart_at_s:
        return Wait(now.failures.restart_at_s)
    return Launch()


def must_replace(engine: EngineView, wanted: Wanted) -> bool:
    """Whether the change is more than its objective, which a running engine takes without a restart."""
    if engine.objective_refused or engine.claim.slots != wanted.claim.slots:
        return True
    return wanted.spec.takes_another_engine(engine.spec)


def phase(now: Situation, now_s: float) -> Phase:
    engine = now.engine
    if now.wanted.ending or (engine and engine.drain_by_s is not None):
        return ReplicaStatus.DRAINING
    if engine:
        return ReplicaStatus.READY if engine.ready and not engine.killed else ReplicaStatus.STARTING
    if now.failed_generation == now.wanted.spec.generation:
        return ReplicaStatus.FAILED
    return ReplicaStatus.BACKING_OFF if now_s < now.failures.restart_at_s else ReplicaStatus.STARTING
