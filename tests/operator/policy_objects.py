"""Policies and services for tests of what policies do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tidelane.operator.policies import Policies, Policy
from tidelane.operator.resources import Service

from .world import service_object


def policy_object(name: str = "gold", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tidelane.dev/v1alpha1",
        "kind": "SLOPolicy",
        "metadata": {"name": name, "uid": f"uid of {name}", "generation": 1, "resourceVersion": "1"},
        "spec": {"selector": {}, "priority": 0, "mode": "Enforce", **spec},
    }


def policy(name: str = "gold", status: Any = None, **spec: Any) -> Policy:
    raw = policy_object(name, **spec)
    return Policy.parse({**raw, "status": status} if status else raw)


def tpot(target: str) -> dict[str, Any]:
    return {"slo": {"tpot": target}}


def policies(*each: Policy, **namespaces: Mapping[str, str]) -> Policies:
    return Policies(each, {"default": {}, **namespaces})


def service(
    name: str = "chat",
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
    status: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Service:
    raw = copy.deepcopy(service_object(**spec))
    raw["metadata"] |= {"name": name, "namespace": namespace, "labels": dict(labels or {})}
    return Service.parse({**raw, "status": status} if status else raw)
