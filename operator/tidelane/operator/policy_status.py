"""`status` of a policy: whom it matches, what they get by it, and whether they would meet it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from tidelane.operator.conditions import Verdict, conditions
from tidelane.operator.policies import Policies, Policy, PolicyStatus
from tidelane.operator.prediction import Outlook, Prediction, predict
from tidelane.operator.resources import ObjectRef, Service
from tidelane.operator.targets import Targets, differences

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
            "message": self.prediction.message[:_MESSAGE_LIMIT],
        }


def effect(policy: Policy, policies: Policies, service: Service) -> Effect:
    """On a service that it matches, beside the policies that are enforced."""
    after, before = policies.with_policy(policy, service), policies.without_policy(policy, service)
    return Effect(
        service.ref,
        after.targets,
        differences(before.targets, after.targets),
        predict(service.status, after.targets),
    )


def policy_status(policy: Policy, policies: Policies, services: Sequence[Service], now: datetime) -> PolicyStatus:
    """The status equals what it was when nothing that shows has changed."""
    spec = policy.spec
    if isinstance(spec, str):
        verdicts = {"Ready": Verdict(False, "InvalidSpec", spec), "Stalled": Verdict(True, "InvalidSpec", spec)}
        return _assembled(policy, verdicts, {}, now)
    living = [each for each in services if not each.deleting]
    effects = [effect(policy, policies, each) for each in policies.matched(policy, living)]
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
