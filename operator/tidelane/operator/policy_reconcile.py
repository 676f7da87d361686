"""Policies: observe, tell the services whose targets change, say in each policy's status what it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from tidelane.operator.cluster import Cluster
from tidelane.operator.forecasts import Answer, Forecasts, Traffic
from tidelane.operator.observation import Timing
from tidelane.operator.policies import Policies, Policy
from tidelane.operator.policy_status import policy_status
from tidelane.operator.prediction import Simulated
from tidelane.operator.resources import ObjectRef, RawObject, Service
from tidelane.operator.targets import Effective

log = logging.getLogger(__name__)


class PolicyReconciler:
    """All policies at once, since what a service gets depends on all. Looking once too often does nothing.

    `traffic` is what comes to each service by now, and `forecasts` says what would become of it.
    `current` is what holds; `targets_changed` hears the name of each service that gets other targets.
    """

    def __init__(
        self,
        cluster: Cluster,
        now: Callable[[], datetime],
        timing: Timing,
        targets_changed: Callable[[ObjectRef], None],
        traffic: Callable[[], Mapping[ObjectRef, Traffic]],
        forecasts: Forecasts,
    ) -> None:
        self.current = Policies(unread=True)
        self._cluster = cluster
        self._now = now
        self._timing = timing
        self._targets_changed = targets_changed
        self._traffic = traffic
        self._forecasts = forecasts
        # What the services have been told of: behind `current` while a look is under way or has failed.
        self._told = self.current
        self._readable = True
        self._namespaces_readable = True

    async def start(self) -> None:
        """Learns what holds before any service is looked at."""
        self.current = self._told = await self._read()

    def knows(self, raw: RawObject) -> bool:
        """Whether all of it but its status is what was last read."""
        told = Policy.parse(raw)
        return any(replace(told, status=each.status) == each for each in self.current.policies)

    def may_miss(self, namespace: str) -> bool:
        """Whether a look would tell labels of that namespace that matter and are not known."""
        return self._namespaces_readable and namespace not in self.current.namespaces

    async def reconcile(self) -> float:
        """Returns in how many seconds to come again: labels of namespaces change without a word."""
        self.current = await self._read()
        if not any((self.current.policies, self._told.policies, self.current.unread != self._told.unread)):
            return self._timing.recheck_s
        services = [Service.parse(raw) for raw in await self._cluster.services()]
        understood = [each for each in services if not isinstance(each.spec, str)]
        for service in understood:
            if self._told.effective(service) != self.current.effective(service):
                self._targets_changed(service.ref)
        self._told = self.current
        if not all(each.enforced for each in self.current.policies):
            self._forecasts.see(self._traffic())
        for policy in self.current.policies:
            status = policy_status(policy, self.current, understood, self._now(), self._simulated)
            if status != policy.status and not policy.deleting:
                await self._cluster.write_policy_status(policy.name, policy.uid, status)
            # The agents' turn: a policy over a thousand services takes a tenth of a second.
            await asyncio.sleep(0)
        self._forecasts.work()
        return self._timing.recheck_s

    def _simulated(self, service: Service, now: Effective, then: Effective) -> Simulated | None:
        def answer(effective: Effective) -> Answer | None:
            spec = service.with_targets(effective).spec
            assert not isinstance(spec, str)
            return self._forecasts.answer(service.ref, spec.objective)

        return Simulated(answer(now), answer(then))

    async def _read(self) -> Policies:
        found = await self._cluster.policies()
        if (found is not None) != self._readable:
            self._readable = found is not None
            log.warning(
                "policies %s",
                "can be read" if self._readable else "cannot be read: no right to; what services got by them holds on",
            )
        if found is None:
            # A right that is lost for a moment must not give every service other targets.
            return self.current
        policies = tuple(sorted(map(Policy.parse, found), key=lambda each: each.name))
        if not policies:
            return Policies()
        namespaces = await self._cluster.namespaces()
        self._namespaces_readable = namespaces is not None
        return Policies(policies, self.current.namespaces if namespaces is None else namespaces)
