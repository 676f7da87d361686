"""The objects that lead a service's clients to its engines: one Service, and one EndpointSlice for each replica.

A slice has one list of ports for all its addresses, and every engine has a port of its own: hence a slice for each.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from tidelane.operator.crd import API_VERSION, GROUP, KIND
from tidelane.operator.resources import RawObject, Service

SERVICE_LABEL: Final = f"{GROUP}/service"
_PORT: Final = 80


def service_manifest(service: Service) -> RawObject:
    # No selector: the EndpointSlices are the operator's own.
    ports = [{"name": "http", "port": _PORT, "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, service.ref.name),
        "spec": {"ports": ports},
    }


def endpoint_slice(service: Service, index: int, host: str, port: int) -> RawObject:
    """The host must be `publishable`."""
    address = ipaddress.ip_address(host)
    metadata = _metadata(service, f"{service.ref.name}-{index}")
    metadata["labels"] |= {
        "kubernetes.io/service-name": service.ref.name,
        "endpointslice.kubernetes.io/managed-by": f"operator.{GROUP}",
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": f"IPv{address.version}",
        "endpoints": [{"addresses": [str(address)], "conditions": {"ready": True}}],
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def publishable(host: str) -> bool:
    """Whether the API server takes the host in an EndpointSlice: it refuses loopback addresses, among others."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified)


def is_owned(child: RawObject, uid: str) -> bool:
    """Whether the InferenceService with that uid made it."""
    return uid in _owners(child)


def is_ours(child: RawObject) -> bool:
    """Whether some InferenceService made it, perhaps a former one of the same name."""
    return bool(_owners(child))


def matches(child: RawObject, wanted: RawObject) -> bool:
    """Whether the child says all that is wanted; what the API server or others add does not count."""
    return _covers(child, wanted)


def _metadata(service: Service, name: str) -> dict[str, Any]:
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service.ref.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": service.ref.namespace,
        "labels": {"app.kubernetes.io/managed-by": "tidelane", SERVICE_LABEL: service.ref.name},
        "ownerReferences": [owner],
    }


def _owners(child: RawObject) -> set[str]:
    references = child["metadata"].get("ownerReferences") or ()
    return {each["uid"] for each in references if each["kind"] == KIND and each["apiVersion"].startswith(f"{GROUP}/")}


def _covers(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_covers(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(_covers(*pair) for pair in zip(found, wanted, strict=True))
        )
    return bool(found == wanted)
