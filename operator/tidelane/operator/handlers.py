"""The operator as a kopf operator: what kopf sees becomes names in the queue. The only module that imports kopf.

kopf lists and watches; it keeps nothing on our objects: no handler returns anything, and only event handlers are used,
so that it adds no finalizer, annotation or status of its own. The prefixes set below hold should that ever change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import kopf
from kubernetes_asyncio.client import ApiClient

from tidelane.operator.agents import OpenChannel
from tidelane.operator.children import SERVICE_LABEL
from tidelane.operator.control import Control
from tidelane.operator.crd import GROUP, PLURAL, VERSION
from tidelane.operator.discovery import Agents
from tidelane.operator.errors import Retry
from tidelane.operator.kubernetes_cluster import KubernetesCluster
from tidelane.operator.observation import Timing
from tidelane.operator.resources import ObjectRef

log = logging.getLogger(__name__)

# kopf lists everything again whenever a watch ends, so an object is heard of at least this often, changed or not.
_RELIST_S: Final = 300
_SILENCE_S: Final = 3 * _RELIST_S
_START_RETRY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """`namespaces` empty: all of them. `liveness` is a URL to serve, such as http://0.0.0.0:8080/healthz."""

    agents: Agents
    namespaces: Collection[str] = ()
    liveness: str | None = None
    timing: Timing = field(default_factory=Timing)


async def run_operator(settings: OperatorSettings, client: ApiClient, open_channel: OpenChannel) -> None:
    """Until cancelled or told to stop by a signal."""
    cluster = KubernetesCluster(client, settings.namespaces)
    control = Control(cluster, open_channel, settings.timing, settings.namespaces)
    watches = _Watches()
    registry = kopf.OperatorRegistry()
    _register_login(registry)
    _register_settings(registry, clusterwide=not settings.namespaces)
    _register_events(registry, control, watches)
    _register_probe(registry, control, watches)
    await _started(control, await settings.agents.look())
    looking = asyncio.create_task(settings.agents.keep_looking(control.agents.follow), name="agents' addresses")
    try:
        await kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=settings.liveness,
        )
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await control.stop()


@dataclass(slots=True)
class _Watches:
    """When each kind of object was last heard of, and which objects there are."""

    heard_s: dict[str, float] = field(default_factory=dict)
    known: dict[str, set[str]] = field(default_factory=dict)

    def heard(self, kind: str, uid: str, *, deleted: bool) -> None:
        self.heard_s[kind] = time.monotonic()
        (self.known.setdefault(kind, set()).discard if deleted else self.known.setdefault(kind, set()).add)(uid)

    def silent(self) -> list[str]:
        """Kinds with objects that should have been heard of again by now."""
        now_s = time.monotonic()
        return [kind for kind, at_s in self.heard_s.items() if self.known[kind] and now_s - at_s > _SILENCE_S]


async def _started(control: Control, agents: Collection[str]) -> None:
    while True:
        try:
            await control.start(agents)
        except Retry as error:
            log.warning("cannot read the services yet: %s", error)
            await asyncio.sleep(_START_RETRY_S)
        else:
            return


def _register_login(registry: kopf.OperatorRegistry) -> None:
    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # Read anew at each login, so that a rotated token is taken up.
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def _register_settings(registry: kopf.OperatorRegistry, *, clusterwide: bool) -> None:
    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.watching.server_timeout = _RELIST_S
        settings.watching.client_timeout = _RELIST_S + 30
        settings.persistence.finalizer = f"kopf.{GROUP}/finalizer"
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{GROUP}")
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{GROUP}", key="last")
        # In single namespaces there may be no right to list namespaces and CRDs.
        settings.scanning.disabled = not clusterwide


def _register_events(registry: kopf.OperatorRegistry, control: Control, watches: _Watches) -> None:
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def service_changed(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        watches.heard(PLURAL, body.metadata["uid"], deleted=event["type"] == "DELETED")
        control.object_changed(ObjectRef.of(body))

    async def child_changed(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        watches.heard(body["kind"], body.metadata["uid"], deleted=event["type"] == "DELETED")
        control.object_changed(ObjectRef(body.metadata["namespace"], body.metadata.labels[SERVICE_LABEL]))

    ours = {SERVICE_LABEL: kopf.PRESENT}
    kopf.on.event("", "v1", "services", labels=ours, registry=registry)(child_changed)
    kopf.on.event("discovery.k8s.io", "v1", "endpointslices", labels=ours, registry=registry)(child_changed)


def _register_probe(registry: kopf.OperatorRegistry, control: Control, watches: _Watches) -> None:
    @kopf.on.probe(id="control", registry=registry)
    async def probe(**_: Any) -> str:
        faults = [*control.faults, *(f"nothing heard of {kind} for too long" for kind in watches.silent())]
        if faults:
            # Any other error would be tried again instead of being answered.
            raise kopf.PermanentError("; ".join(faults))
        return "alive"
