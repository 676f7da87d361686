"""Which watches count as dead, on a clock of ours."""

from __future__ import annotations

import asyncio

import pytest

from tidelane.operator.crd import KIND
from tidelane.operator.mirror import Mirror
from tidelane.operator.resources import ObjectRef
from tidelane.operator.watches import Watches, live_by_task_name


class Listing:
    """Lists nothing."""

    async def refresh(self) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.live = {KIND, "Service"}
        self.mirror = Mirror(lambda _: None, lambda: self.now_s)
        self.watches = Watches(self.mirror, Listing(), [KIND, "Service"], lambda: self.live, lambda: self.now_s)


def service(version: int) -> dict[str, object]:
    metadata = {"name": "chat", "namespace": "default", "uid": "uid-1", "resourceVersion": str(version)}
    return {"kind": KIND, "metadata": metadata}


def test_a_quiet_cluster_is_no_fault() -> None:
    rig = Rig()
    rig.watches.told("ADDED", service(1))
    rig.now_s = 24 * 3600.0
    assert rig.watches.faults == []


def test_a_watch_that_nobody_keeps_is_one_after_a_minute() -> None:
    rig = Rig()
    rig.live.discard("Service")
    rig.now_s = 60.0
    assert rig.watches.faults == []
    rig.now_s = 61.0
    assert rig.watches.faults == ["nobody watches Service"]
    rig.live.add("Service")
    assert rig.watches.faults == []


def test_a_watch_that_lives_and_tells_nothing_is_one() -> None:
    rig = Rig()
    rig.mirror.listed(KIND, None, [service(5)], version=5)
    rig.now_s = 61.0
    assert rig.watches.faults == [f"the watch on {KIND} is deaf"]
    rig.watches.told("DELETED", service(6))
    assert rig.watches.faults == []
    assert rig.mirror.service(ObjectRef("default", "chat")) is None


async def test_tasks_are_known_by_their_names() -> None:
    live = live_by_task_name({KIND: "watcher for inferenceservices.", "Service": "watcher for services."})
    watcher = asyncio.create_task(asyncio.Event().wait(), name="watcher for services.v1@None")
    assert live() == {"Service"}
    watcher.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher
    assert live() == set()
