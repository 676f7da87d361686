"""The operator's running parts, put together: what both the cluster's handlers and `tidelane up` start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Final

from tidelane.operator.agents import AgentPool, OpenChannel
from tidelane.operator.cluster import Cluster
from tidelane.operator.crd import POLICY_PLURAL
from tidelane.operator.forecasts import Forecasts, traffic_of
from tidelane.operator.node_state import Change
from tidelane.operator.observation import Timing
from tidelane.operator.policy_reconcile import PolicyReconciler
from tidelane.operator.reconcile import Reconciler
from tidelane.operator.resources import ObjectRef, RawObject
from tidelane.operator.simulation import Simulation
from tidelane.operator.workqueue import Meter, WorkQueue

# No service has a name without a namespace.
_POLICIES: Final = ObjectRef("", POLICY_PLURAL)


class Control:
    """Everything that happens leads to a name in the queue; the queue leads to `reconcile`.

    `namespaces` empty: all of them. `may_act`: no other operator does.
    """

    def __init__(
        self,
        cluster: Cluster,
        open_channel: OpenChannel,
        timing: Timing,
        namespaces: Collection[str] = (),
        may_act: Callable[[], bool] = lambda: True,
        meter: Meter | None = None,
    ) -> None:
        self.agents = AgentPool(open_channel, time.monotonic, self._node_changed, may_act)
        self._timing = timing
        self._namespaces = frozenset(namespaces)
        self._forecasts = Forecasts(Simulation().ask, self.policies_changed)
        self._policies = PolicyReconciler(
            cluster,
            lambda: datetime.now(UTC),
            timing,
            self._targets_changed,
            lambda: traffic_of(self.agents.nodes()),
            self._forecasts,
        )
        self._reconciler = Reconciler(
            cluster, self.agents, lambda: datetime.now(UTC), time.monotonic, timing, lambda: self._policies.current
        )
        self._queue = WorkQueue(self._look_at, meter=meter)
        self._loop: asyncio.Task[None] | None = None

    async def start(self, targets: Iterable[str]) -> None:
        """Raises Retry while the cluster cannot be read."""
        # Before any service: none may get its own targets for a moment, and then the policies'.
        await self._policies.start()
        self._queue.add(_POLICIES)
        for ref in await self._reconciler.start():
            self._queue.add(ref)
        self.agents.follow(targets)
        self._loop = asyncio.create_task(self._queue.run(), name="work queue")

    async def stop(self) -> None:
        """What is being looked at is left in the middle; the next start takes it up."""
        if self._loop:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._forecasts.stop()
        await self.agents.close()

    def object_changed(self, ref: ObjectRef) -> None:
        """The service of that name or a child of it has changed."""
        self._reconciler.changed(ref)
        self._queue.add(ref)
        if self._policies.current.policies:
            # What policies say of services follows them slowly; a namespace not heard of may have labels that matter.
            urgent = self._policies.may_miss(ref.namespace)
            self._queue.add(_POLICIES, after_s=0.0 if urgent else self._timing.figures_s)

    def policies_changed(self) -> None:
        """Some SLOPolicy has changed: what a service gets depends on all of them, so they are looked at together."""
        self._queue.add(_POLICIES)

    def policy_told(self, raw: RawObject, *, gone: bool) -> None:
        """What a watch says of one SLOPolicy. A status written here comes back so, and must not lead to the next."""
        if gone or not self._policies.knows(raw):
            self.policies_changed()

    async def _look_at(self, ref: ObjectRef) -> float | None:
        return await (self._policies.reconcile() if ref == _POLICIES else self._reconciler.reconcile(ref))

    def _targets_changed(self, ref: ObjectRef) -> None:
        self._queue.add(ref)

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def agents_connected(self) -> int:
        return sum(node.connected for node in self.agents.nodes().values())

    @property
    def agents_lost(self) -> int:
        return len(self.agents.nodes()) - self.agents_connected

    @property
    def faults(self) -> list[str]:
        """Parts that should run and do not."""
        dead = [f"nobody follows the agent at {target}" for target in self.agents.dead_followers]
        return [*dead, "the work queue ended"] if self._loop is None or self._loop.done() else dead

    def _node_changed(self, node_name: str, change: Change) -> None:
        services = set(change.services)
        if change.room:
            services |= self._reconciler.waiting() | self._reconciler.on_node(node_name)
        for ref in self._ours(services):
            self._queue.add(ref)
        for ref in self._ours(change.measured):
            # Figures come with every message and are written far less often.
            self._queue.add(ref, after_s=self._timing.figures_s / 4)

    def _ours(self, refs: Iterable[ObjectRef]) -> Iterable[ObjectRef]:
        """Agents may serve another operator too, which looks after other namespaces."""
        return (ref for ref in refs if not self._namespaces or ref.namespace in self._namespaces)
