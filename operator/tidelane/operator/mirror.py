"""The objects as watches, lists and our own writes last told of them, so that looking at one costs no request.

An older version never replaces a newer one, whoever tells of it, nor brings back what is gone. Versions are compared as
numbers: Kubernetes promises that since 1.35 (KEP-5504), and has always made them so.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tidelane.operator.children import SERVICE_LABEL
from tidelane.operator.crd import KIND
from tidelane.operator.resources import ObjectRef, RawObject

# Long enough for the last answers and events about an object to come in after its end.
_GONE_REMEMBERED: Final = 10_000

_Key = tuple[str, ObjectRef]


class Mirror:
    """InferenceServices and their children. `changed` hears the name of the service that news are about."""

    def __init__(self, changed: Callable[[ObjectRef], None], clock: Callable[[], float]) -> None:
        self._changed = changed
        self._clock = clock
        self._objects: dict[_Key, RawObject] = {}
        self._children: defaultdict[ObjectRef, dict[_Key, RawObject]] = defaultdict(dict)
        # The version at which each uid was no more.
        self._gone: OrderedDict[str, int] = OrderedDict()
        # What a list told first, by uid: kind, version, and since when its watch owes it.
        self._owed: dict[str, tuple[str, int, float]] = {}

    def service(self, ref: ObjectRef) -> RawObject | None:
        return self._objects.get((KIND, ref))

    def services(self) -> Sequence[RawObject]:
        return [raw for (kind, _), raw in self._objects.items() if kind == KIND]

    def children(self, ref: ObjectRef) -> Sequence[RawObject]:
        """Those that are labelled for that service; the Service first."""
        found = self._children.get(ref, {})
        return [found[key] for key in sorted(found, key=lambda key: (key[0] != "Service", key[1]))]

    def known(self, kind: str, ref: ObjectRef, uid: str) -> RawObject | None:
        found = self._objects.get((kind, ref))
        return found if found and found["metadata"]["uid"] == uid else None

    def watched(self, raw: RawObject) -> None:
        """A watch told of it."""
        owed = self._owed.get(raw["metadata"]["uid"])
        if owed and owed[1] <= version_of(raw):
            del self._owed[raw["metadata"]["uid"]]
        self.saw(raw)

    def saw(self, raw: RawObject) -> bool:
        """It is so, or was: whether that is news. A child that is not labelled is none of ours."""
        if raw["kind"] != KIND and SERVICE_LABEL not in raw["metadata"].get("labels", {}):
            return False
        key, uid, version = _key(raw), raw["metadata"]["uid"], version_of(raw)
        known = self._objects.get(key)
        if self._gone.get(uid, -1) >= version or (known and version_of(known) >= version):
            return False
        self._put(key, raw)
        self._changed(_service(raw))
        return True

    def gone(self, kind: str, ref: ObjectRef, uid: str, version: int) -> None:
        """The object with that uid was no more, or not one of ours, at that version."""
        self._gone[uid] = version
        if len(self._gone) > _GONE_REMEMBERED:
            self._gone.popitem(last=False)
        self._owed.pop(uid, None)
        known = self._objects.get((kind, ref))
        if known and known["metadata"]["uid"] == uid and version_of(known) <= version:
            self._drop((kind, ref), known)
            self._changed(_service(known))

    def listed(self, kind: str, namespace: str | None, items: Iterable[RawObject], version: int) -> None:
        """All of that kind, in that namespace or (None) everywhere, at that version: what else is known is gone."""
        there = set()
        for raw in items:
            there.add(raw["metadata"]["uid"])
            if self.saw(raw):
                self._owed[raw["metadata"]["uid"]] = kind, version_of(raw), self._clock()
        for (known_kind, ref), known in list(self._objects.items()):
            absent = known["metadata"]["uid"] not in there and namespace in (None, ref.namespace)
            if known_kind == kind and absent and version_of(known) <= version:
                self.gone(kind, ref, known["metadata"]["uid"], version)

    def deaf(self, for_s: float) -> Sequence[str]:
        """Kinds whose watch has for so long not told of something that a list did."""
        now_s = self._clock()
        return sorted({kind for kind, _, since_s in self._owed.values() if now_s - since_s > for_s})

    def _put(self, key: _Key, raw: RawObject) -> None:
        # Half of each object, and of no use here.
        metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
        stored = {**raw, "metadata": metadata}
        if (known := self._objects.get(key)) is not None:
            self._drop(key, known)
        self._objects[key] = stored
        if key[0] != KIND:
            self._children[_service(raw)][key] = stored

    def _drop(self, key: _Key, known: RawObject) -> None:
        del self._objects[key]
        if key[0] != KIND:
            belongs_to = _service(known)
            del self._children[belongs_to][key]
            if not self._children[belongs_to]:
                del self._children[belongs_to]


def _key(raw: RawObject) -> _Key:
    return raw["kind"], ObjectRef.of(raw)


def version_of(raw: RawObject) -> int:
    return int(raw["metadata"]["resourceVersion"])


def _service(raw: RawObject) -> ObjectRef:
    ref = ObjectRef.of(raw)
    return ref if raw["kind"] == KIND else ObjectRef(ref.namespace, raw["metadata"]["labels"][SERVICE_LABEL])
