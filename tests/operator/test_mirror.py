"""The mirror ends at the truth whatever is told in which order, and knows which watch owes it something."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tidelane.operator.children import SERVICE_LABEL
from tidelane.operator.crd import KIND
from tidelane.operator.mirror import Mirror
from tidelane.operator.resources import ObjectRef

CHAT = ObjectRef("default", "chat")


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.changed: list[ObjectRef] = []
        self.mirror = Mirror(self.changed.append, lambda: self.now_s)


def service(version: int, uid: str = "uid-1", **metadata: Any) -> dict[str, Any]:
    known = {"name": "chat", "namespace": "default", "uid": uid, "resourceVersion": str(version)}
    return {"kind": KIND, "metadata": known | metadata}


def child(version: int, kind: str = "EndpointSlice", name: str = "chat-0") -> dict[str, Any]:
    labels = {SERVICE_LABEL: "chat"}
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"kind": kind, "metadata": metadata | {"labels": labels}}


def test_an_older_version_changes_nothing_and_is_no_news() -> None:
    rig = Rig()
    assert rig.mirror.saw(service(9))
    assert not rig.mirror.saw(service(9))
    assert not rig.mirror.saw(service(8))
    assert rig.mirror.service(CHAT) == service(9)
    assert rig.changed == [CHAT]


def test_what_is_gone_does_not_come_back_by_a_late_answer() -> None:
    rig = Rig()
    rig.mirror.saw(service(5))
    rig.mirror.gone(KIND, CHAT, "uid-1", 8)
    assert not rig.mirror.saw(service(7))
    assert rig.mirror.service(CHAT) is None
    assert rig.mirror.saw(service(9, uid="uid-2"))


def test_what_lost_its_label_and_gets_it_again_is_known_again() -> None:
    rig = Rig()
    rig.mirror.saw(child(3))
    rig.mirror.gone("EndpointSlice", ObjectRef("default", "chat-0"), "uid-chat-0", 4)
    assert rig.mirror.children(CHAT) == []
    rig.mirror.saw(child(5))
    assert rig.mirror.children(CHAT) == [child(5)]


def test_children_belong_to_a_service_and_the_service_comes_first() -> None:
    rig = Rig()
    rig.mirror.saw(child(3))
    rig.mirror.saw(child(4, "Service", "chat"))
    foreign = child(5, "Service", "other")
    foreign["metadata"]["labels"] = {}
    assert not rig.mirror.saw(foreign)
    assert [each["kind"] for each in rig.mirror.children(CHAT)] == ["Service", "EndpointSlice"]
    assert rig.changed == [CHAT, CHAT]


def test_a_list_takes_away_what_is_not_on_it_and_not_newer() -> None:
    rig = Rig()
    rig.mirror.saw(service(3))
    rig.mirror.saw(child(4))
    rig.mirror.listed("EndpointSlice", None, [], version=3)
    assert rig.mirror.children(CHAT) == [child(4)]
    rig.mirror.listed("EndpointSlice", "elsewhere", [], version=9)
    assert rig.mirror.children(CHAT) == [child(4)]
    rig.mirror.listed("EndpointSlice", None, [], version=9)
    assert rig.mirror.children(CHAT) == []
    assert rig.mirror.service(CHAT) == service(3)


def test_a_watch_that_does_not_tell_what_a_list_did_is_deaf() -> None:
    rig = Rig()
    rig.mirror.watched(service(3))
    rig.mirror.listed(KIND, None, [service(6)], version=7)
    rig.now_s = 61.0
    assert rig.mirror.deaf(60.0) == [KIND]
    rig.mirror.watched(service(5))
    assert rig.mirror.deaf(60.0) == [KIND]
    rig.mirror.watched(service(6))
    assert rig.mirror.deaf(60.0) == []


@pytest.mark.parametrize("seed", range(50))
def test_any_order_ends_at_the_newest(seed: int) -> None:
    rig, order = Rig(), random.Random(seed)
    tales = [service(version) for version in range(1, 9)]
    order.shuffle(tales)
    for told in tales:
        order.choice([rig.mirror.saw, rig.mirror.watched])(told)
    assert rig.mirror.service(CHAT) == service(8)
