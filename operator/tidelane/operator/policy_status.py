"""`status` of a policy: whom it matches, what they get by it, and whether they would meet it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from tidelane.operator.conditions import Verdict, conditions
from tidelane.operator.policies import Policies, Policy, PolicyStatus
from tidelane.operator.prediction import Outlook, Prediction, Simulated, predict
from tidelane.operator.quantities import format_duration
from tidelane.operator.resources import ObjectRef, Service
from tidelane.operator.targets import Effective, Targets, differences

# As in the schema: a status that grows with the cluster would end up too large to store.
_LISTED: Final = 64
_NAMED: Final = 5
_MESSAGE_LIMIT: Final = 256
_ORDER: Final = (Outlook.BREACH, Outlook.UNKNOWN, Outlook.MEET)


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one policy on one service."""

    ref: ObjectRef
    targets: Targets
    changes: Mapping[str, tuple[str, str]]
    prediction: Prediction

    @property
    def shown(self) -> Mapping[str, Any]:
        changes = [{"field": name, "from": old, "to": new} for name, (old, new) in self.changes.items()]
        return {
            "namespace": self.ref.namespace,
            "name": self.ref.name,
            "effective": self.targets.shown(),
            **({"changes": changes} if changes else {}),
            "verdict": self.prediction.outlook.value,
            "attainmentAtLeast": self.prediction.at_least,
            "attainmentAtMost": self.prediction.at_most,
            "basis": self.prediction.basis.value,
            **_forecast(self.prediction),
            "message": self.prediction.message[:_MESSAGE_LIMIT],
        }


def _forecast(prediction: Prediction) -> Mapping[str, Any]:
    forecast = prediction.forecast
    if forecast is None:
        return {}
    latencies_s = {"ttft": forecast.ttft_s, "tpot": forecast.tpot_s}
    shown: dict[str, Any] = {"attainment": forecast.attainment}
    # Two digits: more would say that more is known.
    shown |= {name: format_duration(float(f"{each:.2g}")) for name, each in latencies_s.items() if each is not None}
    return {"simulated": shown if forecast.replicas is None else {**shown, "replicas": forecast.replicas}}


# What simulation says of a service with these targets in force, and with those that a policy would give it.
Simulate = Callable[[Service, Effective, Effective], Simulated | None]


def not_simulated(_service: Service, _now: Effective, _then: Effective) -> None:
    """For those who have no simulator."""


def effect(policy: Policy, policies: Policies, service: Service, simulate: Simulate = not_simulated) -> Effect:
    """On a service that it matches, beside the policies that are enforced."""
    after, before = policies.with_policy(policy, service), policies.without_policy(policy, service)
    # What is enforced is measured.
    simulated = None if policy.enforced else simulate(service, before, after)
    return Effect(
        service.ref,
        after.targets,
        differences(before.targets, after.targets),
        predict(service.status, after.targets, simulated),
    )


def policy_status(
    policy: Policy,
    policies: Policies,
    services: Sequence[Service],
    now: datetime,
    simulate: Simulate = not_simulated,
) -> PolicyStatus:
    """The status equals what it was when nothing that shows has changed."""
    spec = policy.spec
    if isinstance(spec, str):
        verdicts = {"Ready": Verdict(False, "InvalidSpec", spec), "Stalled": Verdict(True, "InvalidSpec", spec)}
        return _assembled(policy, verdicts, {}, now)
    living = [each for each in services if not each.deleting]
    effects = [effect(policy, policies, each, simulate) for each in policies.matched(policy, living)]
    effects.sort(key=lambda each: (_ORDER.index(each.prediction.outlook), each.ref))
    counts = Counter(each.prediction.outlook for each in effects)
    rest: dict[str, Any] = {
        "matched": len(effects),
        "changed": sum(bool(each.changes) for each in effects),
        "wouldMeet": counts[Outlook.MEET],
        "wouldBreach": counts[Outlook.BREACH],
        "unknown": counts[Outlook.UNKNOWN],
        "services": [each.shown for each in effects[:_LISTED]],
    }
    ready = Verdict(True, "Enforced" if policy.enforced else "DryRun")
    return _assembled(policy, {"Ready": ready, "Attainable": _attainable(effects, counts)}, rest, now)


def _attainable(effects: Sequence[Effect], counts: Mapping[Outlook, int]) -> Verdict:
    if not effects:
        return Verdict(None, "NothingMatched", "no service has these labels in such a namespace")
    if counts[Outlook.BREACH]:
        return Verdict(False, "WouldBreach", _named(effects, Outlook.BREACH))
    if counts[Outlook.UNKNOWN]:
        return Verdict(None, "TooLittleMeasured", _named(effects, Outlook.UNKNOWN))
    return Verdict(True, "WouldMeet", f"all of {len(effects)}")


def _named(effects: Sequence[Effect], outlook: Outlook) -> str:
    names = [str(each.ref) for each in effects if each.prediction.outlook is outlook]
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} of {len(effects)}: {', '.join(names[:_NAMED])}{more}"


def _assembled(policy: Policy, verdicts: Mapping[str, Verdict], rest: Mapping[str, Any], now: datetime) -> PolicyStatus:
    shown = conditions(policy.status.get("conditions", ()), policy.generation, verdicts, now)
    return cast("PolicyStatus", {"observedGeneration": policy.generation, **rest, "conditions": shown})
