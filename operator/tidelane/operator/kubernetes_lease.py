"""A Lease of coordination.k8s.io/v1, as `lease` wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from kubernetes_asyncio.client import ApiClient, CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta
from kubernetes_asyncio.client.exceptions import ApiException

from tidelane.operator.errors import Conflict, Refused, Retry
from tidelane.operator.lease import LeaseTiming, Record
from tidelane.operator.resources import ObjectRef

_MEANINGS: Final = {
    403: "no right to it: get, create and update on leases of coordination.k8s.io are needed",
    404: "there is no such Lease, or no such namespace",
    422: "it cannot have that name",
}
# Well within the time that a holder may act without a renewal, so that a hanging call is tried again.
_TIMEOUT_S: Final = 4.0


class KubernetesLease:
    def __init__(self, client: ApiClient, ref: ObjectRef) -> None:
        self._api = CoordinationV1Api(client)
        self._ref = ref

    async def read(self) -> Record | None:
        try:
            return _record(await self._call(self._api.read_namespaced_lease(self._ref.name, self._ref.namespace)))
        except _Absent:
            return None

    async def create(self, holder: str, duration_s: float) -> Record:
        body = self._lease(holder, duration_s, 0, version=None)
        return _record(await self._call(self._api.create_namespaced_lease(self._ref.namespace, body)))

    async def replace(self, record: Record, holder: str, duration_s: float, transitions: int) -> Record:
        body = self._lease(holder, duration_s, transitions, version=record.version)
        call = self._api.replace_namespaced_lease(self._ref.name, self._ref.namespace, body)
        return _record(await self._call(call))

    def _lease(self, holder: str, duration_s: float, transitions: int, version: str | None) -> V1Lease:
        # The times are for people and other tools: no operator compares them with its own.
        spec = V1LeaseSpec(
            holder_identity=holder,
            lease_duration_seconds=int(duration_s),
            lease_transitions=transitions,
            renew_time=datetime.now(UTC),
        )
        metadata = V1ObjectMeta(name=self._ref.name, namespace=self._ref.namespace, resource_version=version)
        return V1Lease(metadata=metadata, spec=spec)

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await call
        except ApiException as error:
            meaning = _MEANINGS.get(error.status, error.reason)
            raise _kind(error.status)(f"Lease {self._ref}: {error.status} {meaning}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Retry(f"Lease {self._ref}: {error!r}") from error


class _Absent(Refused):
    """404: no such Lease; or, where it was to be created, no such namespace."""


def _kind(status: int) -> type[Retry]:
    match status:
        case 404:
            return _Absent
        case 409:
            return Conflict
        case 408 | 429:
            return Retry
        case _:
            return Refused if 400 <= status < 500 else Retry


def _record(lease: Any) -> Record:
    spec = lease.spec or V1LeaseSpec()  # both are optional: one without a holder is free
    return Record(
        holder=spec.holder_identity or "",
        version=lease.metadata.resource_version,
        duration_s=float(spec.lease_duration_seconds or LeaseTiming().duration_s),
        transitions=spec.lease_transitions or 0,
    )
