"""The operator's running parts, put together: what both the cluster's handlers and `tidelane up` start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from datetime import UTC, datetime

from tidelane.operator.agents import AgentPool, OpenChannel
from tidelane.operator.cluster import Cluster
from tidelane.operator.node_state import Change
from tidelane.operator.observation import Timing
from tidelane.operator.reconcile import Reconciler
from tidelane.operator.resources import ObjectRef
from tidelane.operator.workqueue import WorkQueue


class Control:
    """Everything that happens leads to a name in the queue; the queue leads to `reconcile`.

    `namespaces` empty: all of them.
    """

    def __init__(
        self, cluster: Cluster, open_channel: OpenChannel, timing: Timing, namespaces: Collection[str] = ()
    ) -> None:
        self.agents = AgentPool(open_channel, time.monotonic, self._node_changed)
        self._timing = timing
        self._namespaces = frozenset(namespaces)
        self._reconciler = Reconciler(cluster, self.agents, lambda: datetime.now(UTC), time.monotonic, timing)
        self._queue = WorkQueue(self._reconciler.reconcile)
        self._loop: asyncio.Task[None] | None = None

    async def start(self, targets: Iterable[str]) -> None:
        """Raises Retry while the cluster cannot be read."""
        for ref in await self._reconciler.start():
            self._queue.add(ref)
        self.agents.follow(targets)
        self._loop = asyncio.create_task(self._queue.run(), name="work queue")

    async def stop(self) -> None:
        """What is being looked at is left in the middle; the next start takes it up."""
        if self._loop:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self.agents.close()

    def object_changed(self, ref: ObjectRef) -> None:
        """The service of that name or a child of it has changed."""
        self._reconciler.changed(ref)
        self._queue.add(ref)

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
