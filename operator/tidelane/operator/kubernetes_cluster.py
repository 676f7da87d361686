"""The cluster, when there is one: the API server. Children are applied server-side; there is one field manager."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from typing_extensions import override

from tidelane.operator.children import SERVICE_LABEL
from tidelane.operator.cluster import Cluster
from tidelane.operator.crd import API_VERSION, GROUP, KIND, PLURAL, POLICY_PLURAL, VERSION
from tidelane.operator.errors import Conflict, Deposed, NoCluster, Retry
from tidelane.operator.policies import NAME_LABEL, Labels, PolicyStatus
from tidelane.operator.recent_events import RecentEvents, Written
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, RawObject, Status

log = logging.getLogger(__name__)

FIELD_MANAGER: Final = "tidelane-operator"
_TIMEOUT_S: Final = 30
_PREFIXES: Final[Mapping[str, tuple[str, str]]] = {
    KIND: (f"/apis/{GROUP}/{VERSION}", PLURAL),
    "Service": ("/api/v1", "services"),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices"),
}
_APPLY: Final = "application/apply-patch+yaml"
_JSON_PATCH: Final = "application/json-patch+json"
_MERGE_PATCH: Final = "application/merge-patch+json"
_FORBIDDEN: Final = 403
_GONE: Final = 404
_CONFLICTS: Final = (409, 412, 422)


async def connect(kubeconfig: str | None) -> ApiClient:
    """A client for that file's cluster; None: for the cluster that this process runs in, or the user's default."""
    settings = Configuration()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(config_file=kubeconfig, client_configuration=settings)
    except ConfigException as error:
        raise NoCluster(str(error)) from error
    client = ApiClient(settings)
    client.user_agent = FIELD_MANAGER
    return client


class _Refused(Retry):
    """The API server has no such kind, or not for us; somebody may install it or give the right."""

    def __init__(self, message: str, *, absent: bool) -> None:
        super().__init__(message)
        self.absent = absent


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects of a kind at one version of the cluster. `namespace` None: of all namespaces."""

    namespace: str | None
    version: int
    items: Sequence[RawObject]


class KubernetesCluster(Cluster):
    """`namespaces` empty: all of them. `told` hears every object that the API server answers with, but for lists.

    Nothing is written unless `may_write`: it raises Deposed instead.
    """

    def __init__(
        self,
        client: ApiClient,
        namespaces: Collection[str] = (),
        told: Callable[[RawObject], object] = lambda _: None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._may_write = may_write
        self._namespaces: Sequence[str | None] = [*namespaces] or [None]
        self._told = told
        self._recent = RecentEvents()

    @override
    async def service(self, ref: ObjectRef) -> RawObject | None:
        return await self._object("GET", _path(KIND, ref))

    @override
    async def services(self) -> Sequence[RawObject]:
        return [each for listed in await self.lists(KIND) for each in listed.items]

    async def lists(self, kind: str) -> Sequence[Listed]:
        """All services, or all children made for any; one list for each namespace that is looked after."""
        query = {} if kind == KIND else {"labelSelector": SERVICE_LABEL}
        return [await self._list(kind, namespace, query) for namespace in self._namespaces]

    async def child(self, kind: str, ref: ObjectRef) -> RawObject | None:
        return await self._object("GET", _path(kind, ref))

    @override
    async def policies(self) -> Sequence[RawObject] | None:
        try:
            answer = await self._request("GET", f"/apis/{GROUP}/{VERSION}/{POLICY_PLURAL}")
        except _Refused as error:
            # Where there is no such kind there are no policies; where there is no right to it there may be.
            return () if error.absent else None
        found: Sequence[RawObject] = answer["items"]
        return found

    @override
    async def namespaces(self) -> Mapping[str, Labels] | None:
        ours = [name for name in self._namespaces if name is not None]
        try:
            if ours:
                return {name: await self._labels(name) for name in ours}
            answer = await self._request("GET", "/api/v1/namespaces")
        except _Refused:
            return None
        return {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in answer["items"]}

    async def _labels(self, namespace: str) -> Labels:
        found = await self._request("GET", f"/api/v1/namespaces/{namespace}")
        labels: Labels = ((found or {}).get("metadata") or {}).get("labels") or {NAME_LABEL: namespace}
        return labels

    @override
    async def write_policy_status(self, name: str, uid: str, status: PolicyStatus) -> None:
        path = f"/apis/{GROUP}/{VERSION}/{POLICY_PLURAL}/{name}/status"
        query = {"fieldManager": FIELD_MANAGER}
        await self._request("PATCH", path, query, _status_patch(uid, status), _JSON_PATCH)

    @override
    async def children(self, ref: ObjectRef) -> Sequence[RawObject]:
        service = await self.child("Service", ref)
        slices = await self._list("EndpointSlice", ref.namespace, {"labelSelector": f"{SERVICE_LABEL}={ref.name}"})
        for each in slices.items:
            self._told(each)
        return [service, *slices.items] if service else slices.items

    @override
    async def apply_child(self, manifest: RawObject) -> None:
        path = _path(manifest["kind"], ObjectRef.of(manifest))
        await self._object("PATCH", path, {"fieldManager": FIELD_MANAGER, "force": "true"}, manifest, _APPLY)

    @override
    async def delete_child(self, kind: str, ref: ObjectRef, uid: str) -> None:
        await self._request("DELETE", _path(kind, ref), body={"preconditions": {"uid": uid}})

    @override
    async def write_status(self, ref: ObjectRef, uid: str, status: Status) -> None:
        await self._patch(f"{_path(KIND, ref)}/status", _status_patch(uid, status))

    @override
    async def set_finalizers(self, ref: ObjectRef, finalizers: Sequence[str], resource_version: str) -> None:
        patch: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": resource_version},
            {"op": "add", "path": "/metadata/finalizers", "value": list(finalizers)},
        ]
        await self._patch(_path(KIND, ref), patch)

    @override
    async def report(self, ref: ObjectRef, uid: str, report: Report) -> None:
        try:
            if not await self._count_up(ref, uid, report):
                event = await self._request("POST", _events(ref), body=_event(ref, uid, report))
                if event is not None:
                    self._recent.wrote(uid, report, Written(event["metadata"]["name"]))
        except Retry as error:
            # Events are for people; nothing waits for one.
            log.warning("event not written", extra={"service": str(ref), "error": str(error)})

    async def _count_up(self, ref: ObjectRef, uid: str, report: Report) -> bool:
        """Whether there is such an Event, which says so once more now."""
        written = self._recent.again(uid, report)
        if written is None:
            return False
        patch = {"count": written.count, "lastTimestamp": _now()}
        found = await self._request("PATCH", f"{_events(ref)}/{written.name}", None, patch, _MERGE_PATCH)
        if found is not None:
            self._recent.wrote(uid, report, written)
        return found is not None

    async def _patch(self, path: str, patch: Sequence[Mapping[str, Any]]) -> None:
        await self._object("PATCH", path, {"fieldManager": FIELD_MANAGER}, patch, _JSON_PATCH)

    async def _list(self, kind: str, namespace: str | None, query: Mapping[str, str]) -> Listed:
        answer = await self._request("GET", _folder(kind, namespace), query)
        if answer is None:
            raise Retry(f"{_folder(kind, namespace)} is not there")
        # Items of a list come without what its head says for all of them.
        head = {"apiVersion": answer["apiVersion"], "kind": kind}
        items = [{**each, **head} for each in answer["items"]]
        return Listed(namespace, int(answer["metadata"]["resourceVersion"]), items)

    async def _object(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> RawObject | None:
        answer: RawObject | None = await self._request(method, path, query, body, content_type)
        if answer is not None:
            self._told(answer)
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """The answer; None where there is no such object."""
        if method != "GET" and not self._may_write():
            raise Deposed(f"{method} {path}: another operator may act by now")
        try:
            return await self._client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                response_types_map={200: "object", 201: "object", 202: "object"},
                _return_http_data_only=True,
                _request_timeout=_TIMEOUT_S,
            )
        except ApiException as error:
            if error.status == _GONE and _names_an_object(error.body):
                return None
            text = f"{method} {path}: {error.status} {error.reason}: {error.body!r}"
            if error.status in (_FORBIDDEN, _GONE):
                raise _Refused(text, absent=error.status == _GONE) from error
            raise Conflict(text) if error.status in _CONFLICTS else Retry(text) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Retry(f"{method} {path}: {error!r}") from error


def _status_patch(uid: str, status: Status | PolicyStatus) -> Sequence[Mapping[str, Any]]:
    # Not server-side apply: on this subresource that takes no uid as a condition, and the status of a former object of
    # this name, with its placements, must not end up on another.
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": "/status", "value": status},
    ]


def _event(ref: ObjectRef, uid: str, report: Report) -> Mapping[str, Any]:
    service = {"apiVersion": API_VERSION, "kind": KIND, "namespace": ref.namespace, "name": ref.name, "uid": uid}
    return {
        "metadata": {"generateName": f"{ref.name}.", "namespace": ref.namespace},
        "involvedObject": service,
        "type": "Warning" if report.warning else "Normal",
        "reason": report.reason,
        "message": report.message,
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": _now(),
        "lastTimestamp": _now(),
        "count": 1,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _names_an_object(body: str | bytes | None) -> bool:
    """Whether a 404 is about an object: a kind that is not installed (yet) must not pass for an absent object."""
    try:
        answer = json.loads(body or "")
    except ValueError:
        return False
    return bool(answer.get("details", {}).get("name"))


def _folder(kind: str, namespace: str | None) -> str:
    prefix, plural = _PREFIXES[kind]
    return f"{prefix}/{plural}" if namespace is None else f"{prefix}/namespaces/{namespace}/{plural}"


def _events(ref: ObjectRef) -> str:
    return f"/api/v1/namespaces/{ref.namespace}/events"


def _path(kind: str, ref: ObjectRef) -> str:
    return f"{_folder(kind, ref.namespace)}/{ref.name}"
