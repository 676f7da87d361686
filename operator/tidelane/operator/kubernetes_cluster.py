"""The cluster, when there is one: the API server. Children are applied server-side; there is one field manager."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
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
from tidelane.operator.errors import NoCluster, Retry
from tidelane.operator.policies import NAME_LABEL, Labels, PolicyStatus
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, RawObject, Status

log = logging.getLogger(__name__)

FIELD_MANAGER: Final = "tidelane-operator"
_TIMEOUT_S: Final = 30
_CHILD_PATHS: Final[Mapping[str, str]] = {
    "Service": "/api/v1/namespaces/{namespace}/services",
    "EndpointSlice": "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
}
_APPLY: Final = "application/apply-patch+yaml"
_JSON_PATCH: Final = "application/json-patch+json"
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


class KubernetesCluster(Cluster):
    """`namespaces` empty: all of them."""

    def __init__(self, client: ApiClient, namespaces: Collection[str] = ()) -> None:
        self._client = client
        self._namespaces = tuple(namespaces)
        self._scopes = [f"/namespaces/{each}" for each in namespaces] or [""]

    @override
    async def service(self, ref: ObjectRef) -> RawObject | None:
        found: RawObject | None = await self._request("GET", _service_path(ref))
        return found

    @override
    async def services(self) -> Sequence[RawObject]:
        paths = [f"/apis/{GROUP}/{VERSION}{scope}/{PLURAL}" for scope in self._scopes]
        answers = [await self._request("GET", path) for path in paths]
        return [each for answer in answers for each in answer["items"]]

    @override
    async def policies(self) -> Sequence[RawObject] | None:
        try:
            answer = await self._request("GET", f"/apis/{GROUP}/{VERSION}/{POLICY_PLURAL}")
        except _Refused:
            return None
        found: Sequence[RawObject] = answer["items"]
        return found

    @override
    async def namespaces(self) -> Mapping[str, Labels]:
        if not self._namespaces:
            try:
                answer = await self._request("GET", "/api/v1/namespaces")
            except _Refused:
                return {}
            return {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in answer["items"]}
        return {name: await self._labels(name) for name in self._namespaces}

    async def _labels(self, namespace: str) -> Labels:
        try:
            found = await self._request("GET", f"/api/v1/namespaces/{namespace}")
        except _Refused:
            found = None
        labels: Labels = ((found or {}).get("metadata") or {}).get("labels") or {NAME_LABEL: namespace}
        return labels

    @override
    async def write_policy_status(self, name: str, uid: str, status: PolicyStatus) -> None:
        await self._write_status(f"/apis/{GROUP}/{VERSION}/{POLICY_PLURAL}/{name}", uid, status)

    @override
    async def children(self, ref: ObjectRef) -> Sequence[RawObject]:
        service = await self._request("GET", _child_path("Service", ref))
        folder = _CHILD_PATHS["EndpointSlice"].format(namespace=ref.namespace)
        slices = await self._request("GET", folder, {"labelSelector": f"{SERVICE_LABEL}={ref.name}"})
        # Items of a list come without what its head says for all of them.
        head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
        found = [{**each, **head} for each in (slices or {}).get("items", ())]
        return [service, *found] if service else found

    @override
    async def apply_child(self, manifest: RawObject) -> None:
        path = _child_path(manifest["kind"], ObjectRef.of(manifest))
        await self._request("PATCH", path, {"fieldManager": FIELD_MANAGER, "force": "true"}, manifest, _APPLY)

    @override
    async def delete_child(self, kind: str, ref: ObjectRef, uid: str) -> None:
        await self._request("DELETE", _child_path(kind, ref), body={"preconditions": {"uid": uid}})

    @override
    async def write_status(self, ref: ObjectRef, uid: str, status: Status) -> None:
        await self._write_status(_service_path(ref), uid, status)

    async def _write_status(self, path: str, uid: str, status: Status | PolicyStatus) -> None:
        # Not server-side apply: on this subresource that takes no uid as a condition, and the status of a former object
        # of this name, with its placements, must not end up on another.
        patch: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        await self._patch(f"{path}/status", patch)

    @override
    async def set_finalizers(self, ref: ObjectRef, finalizers: Sequence[str], resource_version: str) -> None:
        patch: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": resource_version},
            {"op": "add", "path": "/metadata/finalizers", "value": list(finalizers)},
        ]
        await self._patch(_service_path(ref), patch)

    @override
    async def report(self, ref: ObjectRef, uid: str, report: Report) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "metadata": {"generateName": f"{ref.name}.", "namespace": ref.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": ref.namespace,
                "name": ref.name,
                "uid": uid,
            },
            "type": "Warning" if report.warning else "Normal",
            "reason": report.reason,
            "message": report.message,
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._request("POST", f"/api/v1/namespaces/{ref.namespace}/events", body=event)
        except Retry as error:
            # Events are for people; nothing waits for one.
            log.warning("event not written", extra={"service": str(ref), "error": str(error)})

    async def _patch(self, path: str, patch: Sequence[Mapping[str, Any]]) -> None:
        await self._request("PATCH", path, {"fieldManager": FIELD_MANAGER}, patch, _JSON_PATCH)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """The answer; None where there is no such object."""
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
                raise _Refused(text) from error
            raise Retry(text, after_s=0.0 if error.status in _CONFLICTS else None) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Retry(f"{method} {path}: {error!r}") from error


def _names_an_object(body: str | bytes | None) -> bool:
    """Whether a 404 is about an object: a kind that is not installed (yet) must not pass for an absent object."""
    try:
        answer = json.loads(body or "")
    except ValueError:
        return False
    return bool(answer.get("details", {}).get("name"))


def _service_path(ref: ObjectRef) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{ref.namespace}/{PLURAL}/{ref.name}"


def _child_path(kind: str, ref: ObjectRef) -> str:
    return f"{_CHILD_PATHS[kind].format(namespace=ref.namespace)}/{ref.name}"
