"""SLOPolicy: from what the API server holds to frozen values, which services it matches, and what they get. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self, TypedDict

from tidelane.operator.resources import Condition, ObjectRef, RawObject, Service
from tidelane.operator.targets import SPEC, Effective, Layer, Targets, merge

Labels = Mapping[str, str]

# Of the words of `status.effectiveSLO.sources`.
_OURS: Final = "SLOPolicy "
_OVERRIDES: Final = " (overrides)"
_DEFAULTS: Final = " (defaults)"
# The API server sets it on every namespace.
NAME_LABEL: Final = "kubernetes.io/metadata.name"


class PolicyStatus(TypedDict, total=False):
    """`status` of an SLOPolicy; the CRD says what each field means."""

    observedGeneration: int
    conditions: Sequence[Condition]
    matched: int
    changed: int
    wouldMeet: int
    wouldBreach: int
    unknown: int
    services: Sequence[Mapping[str, Any]]


class Mode(StrEnum):
    DRY_RUN = "DryRun"
    ENFORCE = "Enforce"


class Operator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One entry of matchExpressions, with the meaning that Kubernetes gives it."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def matches(self, labels: Labels) -> bool:
        match self.operator:
            case Operator.IN:
                return labels.get(self.key) in self.values
            case Operator.NOT_IN:
                return labels.get(self.key) not in self.values
            case Operator.EXISTS:
                return self.key in labels
            case Operator.DOES_NOT_EXIST:
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """All of it must hold; empty, it matches everything."""

    labels: Labels = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ValueError or KeyError for what the CRD would refuse."""
        requirements = (
            Requirement(each["key"], Operator(each["operator"]), frozenset(each.get("values", ())))
            for each in raw.get("matchExpressions", ())
        )
        return cls(raw.get("matchLabels", {}), tuple(requirements))

    def matches(self, labels: Labels) -> bool:
        return self.labels.items() <= labels.items() and all(each.matches(labels) for each in self.requirements)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    services: LabelSelector
    namespaces: LabelSelector
    priority: int
    mode: Mode
    defaults: Targets
    overrides: Targets

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Raises ValueError or KeyError for what the CRD would refuse."""
        return cls(
            services=LabelSelector.parse(spec["selector"]),
            namespaces=LabelSelector.parse(spec["selector"].get("namespaceSelector", {})),
            priority=spec.get("priority", 0),
            mode=Mode(spec.get("mode", Mode.DRY_RUN)),
            defaults=Targets.parse(spec.get("defaults", {})),
            overrides=Targets.parse(spec.get("overrides", {})),
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """One SLOPolicy as it is now. `spec` is a text saying why, where it cannot be understood: it then does nothing."""

    name: str
    uid: str
    generation: int
    deleting: bool
    spec: PolicySpec | str
    status: PolicyStatus

    @classmethod
    def parse(cls, raw: RawObject) -> Self:
        metadata = raw["metadata"]
        try:
            spec: PolicySpec | str = PolicySpec.parse(raw["spec"])
        except KeyError as error:
            spec = f"spec: {error.args[0]} is missing"
        except ValueError as error:
            spec = f"spec: {error}"
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            deleting="deletionTimestamp" in metadata,
            spec=spec,
            status=raw.get("status") or {},
        )

    @property
    def enforced(self) -> bool:
        return not isinstance(self.spec, str) and self.spec.mode is Mode.ENFORCE and not self.deleting

    def matches(self, service: Service, namespace: Labels) -> bool:
        spec = self.spec
        return (
            not isinstance(spec, str) and spec.services.matches(service.labels) and spec.namespaces.matches(namespace)
        )


@dataclass(frozen=True, slots=True)
class Policies:
    """Every policy, and the labels of namespaces by name. One that is not among them has no label but its name.

    `unread`: there may be others, which nobody could read yet; what they made of a service is in its status.
    """

    policies: tuple[Policy, ...] = ()
    namespaces: Mapping[str, Labels] = field(default_factory=dict)
    unread: bool = False

    def effective(self, service: Service) -> Effective:
        """What the enforced ones make of a service. Its spec must have been understood."""
        if self.unread:
            return merge(remembered(service))
        return self._merged(service, [each for each in self.policies if each.enforced])

    def with_policy(self, policy: Policy, service: Service) -> Effective:
        """As if `policy` were enforced beside those that are."""
        return self._merged(service, [policy, *self._enforced_but(policy)])

    def without_policy(self, policy: Policy, service: Service) -> Effective:
        return self._merged(service, self._enforced_but(policy))

    def applied(self, service: Service) -> Service:
        """The service with what is in force for it in the place of what it asks for."""
        spec = service.spec
        return service if isinstance(spec, str) else service.with_targets(self.effective(service))

    def matched(self, policy: Policy, services: Sequence[Service]) -> list[Service]:
        return [each for each in services if policy.matches(each, self._labels(each.ref))]

    def _enforced_but(self, policy: Policy) -> list[Policy]:
        return [each for each in self.policies if each.enforced and each.name != policy.name]

    def _labels(self, ref: ObjectRef) -> Labels:
        return self.namespaces.get(ref.namespace, {NAME_LABEL: ref.namespace})

    def _merged(self, service: Service, policies: Sequence[Policy]) -> Effective:
        assert not isinstance(service.spec, str)
        matching = [each for each in policies if each.matches(service, self._labels(service.ref))]
        return merge(layers(service.spec.own, matching))


def layers(own: Targets, policies: Sequence[Policy]) -> list[Layer]:
    """From the strongest to the weakest: overrides by priority and name, the service's own, defaults likewise."""
    specs = [(each.name, each.spec) for each in policies if not isinstance(each.spec, str)]
    ranked = sorted(specs, key=lambda each: (-each[1].priority, each[0]))
    return [
        *(Layer(f"{_OURS}{name}{_OVERRIDES}", spec.overrides) for name, spec in ranked),
        Layer(SPEC, own),
        *(Layer(f"{_OURS}{name}{_DEFAULTS}", spec.defaults) for name, spec in ranked),
    ]


def remembered(service: Service) -> list[Layer]:
    """As `layers`, of what the service's status says that policies gave it. Its spec must have been understood."""
    assert not isinstance(service.spec, str)
    slo, bounds = service.status.get("effectiveSLO", {}), service.status.get("effectiveExecution", {})
    fields: dict[str, set[str]] = {}
    for each in slo.get("sources", ()):
        fields.setdefault(each["source"], set()).add(each["field"])

    def given(end: str) -> list[Layer]:
        return [
            Layer(source, Targets.parse({"slo": _only(slo, names), "execution": _only(bounds, names)}))
            for source, names in sorted(fields.items())
            if source.startswith(_OURS) and source.endswith(end)
        ]

    # Each field has one source: among policies no order matters any more.
    return [*given(_OVERRIDES), Layer(SPEC, service.spec.own), *given(_DEFAULTS)]


def _only(of: Mapping[str, Any], names: set[str]) -> Mapping[str, Any]:
    return {name: value for name, value in of.items() if name in names}
