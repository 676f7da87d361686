"""The operator as a kopf operator: what kopf sees becomes names in the queue. The only module that imports kopf.

kopf lists and watches; it keeps nothing on our objects: no handler returns anything, and only event handlers are used,
so that it adds no finalizer, annotation or status of its own. The prefixes set below hold should that ever change.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

import kopf
from kubernetes_asyncio.client import ApiClient

from tidelane.operator.agents import OpenChannel
from tidelane.operator.children import SERVICE_LABEL
from tidelane.operator.control import Control
from tidelane.operator.crd import GROUP, KIND, PLURAL, POLICY_PLURAL, VERSION
from tidelane.operator.discovery import Agents
from tidelane.operator.errors import Retry
from tidelane.operator.kubernetes_cluster import KubernetesCluster
from tidelane.operator.kubernetes_lease import KubernetesLease
from tidelane.operator.lease import Candidate
from tidelane.operator.metrics import OperatorMetrics
from tidelane.operator.mirror import Mirror
from tidelane.operator.observation import Timing
from tidelane.operator.probe import Probe
from tidelane.operator.resources import ObjectRef
from tidelane.operator.standby import act_in_turn
from tidelane.operator.watched_cluster import WatchedCluster
from tidelane.operator.watches import Watches, live_by_task_name

log = logging.getLogger(__name__)

# A watch is begun anew so often, from where it was.
_WATCH_S: Final = 300
_START_RETRY_S: Final = 2.0
# Who could not read so long is started again, with whatever rights and addresses there are then.
_START_LIMIT_S: Final = 120.0
_CHILDREN: Final = {
    "Service": ("", "v1", "services"),
    "EndpointSlice": ("discovery.k8s.io", "v1", "endpointslices"),
}
_WATCHED: Final = {KIND: (GROUP, VERSION, PLURAL), **_CHILDREN}


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """`namespaces` empty: all of them. `liveness` and `metrics` are URLs to serve, such as http://0.0.0.0:8080/healthz.

    `lease` is for several operators, of which one acts; None: this is the only one.
    """

    agents: Agents
    namespaces: Collection[str] = ()
    liveness: str | None = None
    metrics: str | None = None
    timing: Timing = field(default_factory=Timing)
    lease: ObjectRef | None = None


async def run_operator(settings: OperatorSettings, client: ApiClient, open_channel: OpenChannel) -> None:
    """Until cancelled or told to stop by a signal. Raises Deposed when another operator has taken over."""
    probe, metrics = Probe(), OperatorMetrics()
    async with probe.served(settings.liveness), metrics.served(settings.metrics):
        if settings.lease is None:
            await _act(settings, client, open_channel, probe, metrics, lambda: True, asyncio.Event())
            return
        # Never another process's name, not even that of one in the same pod before.
        me = f"{socket.gethostname()}_{uuid.uuid4()}"
        candidate = Candidate(KubernetesLease(client, settings.lease), me, time.monotonic)
        await act_in_turn(
            candidate,
            probe,
            lambda deposed: _act(settings, client, open_channel, probe, metrics, lambda: candidate.acts, deposed),
        )


async def _act(
    settings: OperatorSettings,
    client: ApiClient,
    open_channel: OpenChannel,
    probe: Probe,
    metrics: OperatorMetrics,
    may_act: Callable[[], bool],
    stop: asyncio.Event,
) -> None:
    mirror = Mirror(lambda ref: control.object_changed(ref), time.monotonic)
    cluster = WatchedCluster(KubernetesCluster(client, settings.namespaces, mirror.saw, may_act), mirror)
    control = Control(cluster, open_channel, settings.timing, settings.namespaces, may_act, metrics)
    metrics.control = control
    # So kopf names the tasks that watch.
    tasks = {kind: f"watcher for {plural}." for kind, (_, _, plural) in _WATCHED.items()}
    watches = Watches(mirror, cluster, _WATCHED, live_by_task_name(tasks), time.monotonic)
    registry = kopf.OperatorRegistry()
    _register_login(registry)
    _register_settings(registry, clusterwide=not settings.namespaces)
    _register_events(registry, watches)
    if not settings.namespaces:
        # An operator of single namespaces may have no right to watch them, and looks at them each minute.
        _register_policy_events(registry, control)
    await _started(control, await settings.agents.look(), probe, stop)
    probe.enter("alive", ready=True, faults=lambda: [*control.faults, *watches.faults])
    looking = asyncio.create_task(settings.agents.keep_looking(control.agents.follow), name="agents' addresses")
    refreshing = asyncio.create_task(watches.run(), name="refresh")
    try:
        await kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
        )
    finally:
        for task in (looking, refreshing):
            task.cancel()
        await asyncio.gather(looking, refreshing, return_exceptions=True)
        metrics.control = None
        await control.stop()


async def _started(control: Control, agents: Collection[str], probe: Probe, stop: asyncio.Event) -> None:
    began_s, why = time.monotonic(), ""

    def faults() -> list[str]:
        return [f"cannot read the services: {why}"] if why and time.monotonic() - began_s >= _START_LIMIT_S else []

    probe.enter("starting", ready=False, faults=faults)
    while not stop.is_set():
        try:
            await control.start(agents)
        except Retry as error:
            why = str(error)
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
        settings.watching.server_timeout = _WATCH_S
        settings.watching.client_timeout = _WATCH_S + 30
        settings.persistence.finalizer = f"kopf.{GROUP}/finalizer"
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{GROUP}")
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{GROUP}", key="last")
        for group, version, plural in _CHILDREN.values():
            # By the API server: a cluster may have many that are not ours.
            settings.watching.label_selectors[group, version, plural] = SERVICE_LABEL
        # In single namespaces there may be no right to list namespaces and CRDs.
        settings.scanning.disabled = not clusterwide


def _register_events(registry: kopf.OperatorRegistry, watches: Watches) -> None:
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        watches.told(event["type"], event["object"])

    for group, version, plural in _WATCHED.values():
        kopf.on.event(group, version, plural, registry=registry)(changed)


def _register_policy_events(registry: kopf.OperatorRegistry, control: Control) -> None:
    @kopf.on.event(GROUP, VERSION, POLICY_PLURAL, registry=registry)
    async def policy_changed(event: kopf.RawEvent, **_: Any) -> None:
        control.policy_told(event["object"], gone=event["type"] == "DELETED")
