"""Many InferenceServices, as a user with a client sees them: made together, changed together, watched."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes_asyncio import config, watch
from kubernetes_asyncio.client import ApiClient, Configuration, CustomObjectsApi
from kubernetes_asyncio.client.exceptions import ApiException

from control_plane.wrong_manifests import RIGHT

NAMESPACE: Final = "scale"
_KIND: Final = ("tidelane.dev", "v1alpha1", NAMESPACE, "inferenceservices")
# Writes of the user's under way together.
_AT_ONCE: Final = 16
_AGAIN_AFTER_S: Final = 0.2


@dataclass(frozen=True)
class Seen:
    """A service as last heard of. `ready`: at its present generation."""

    generation: int
    owners: Mapping[int, str]
    ready: bool

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Seen:
        status = raw.get("status", {})
        owners = {each["replica"]: each["node"] for each in status.get("placements", ())}
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        generation = raw["metadata"]["generation"]
        fresh = status.get("observedGeneration") == generation
        return cls(generation, owners, fresh and conditions.get("Ready") == "True")


class Services:
    """`made_s`, `placed_s`, `ready_s`: when each was made, first had a node for its replica, was first ready."""

    def __init__(self, client: ApiClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = CustomObjectsApi(client)
        self._clock = clock
        self.heard = asyncio.Event()
        self.following: asyncio.Task[None]
        self.seen: dict[str, Seen] = {}
        self.made_s: dict[str, float] = {}
        self.placed_s: dict[str, float] = {}
        self.ready_s: dict[str, float] = {}

    @property
    def owners(self) -> Mapping[str, Mapping[int, str]]:
        return {name: seen.owners for name, seen in self.seen.items()}

    async def make(self, names: Sequence[str]) -> None:
        async def one(name: str) -> None:
            manifest = copy.deepcopy(dict(RIGHT))
            manifest["metadata"] = {"name": name, "namespace": NAMESPACE}
            self.made_s[name] = self._clock()
            await self._api.create_namespaced_custom_object(*_KIND, manifest)

        await _together(one, names)

    async def retarget(self, names: Sequence[str], tpot: str) -> None:
        """A change that running engines take without a restart."""
        patch = [{"op": "replace", "path": "/spec/slo/tpot", "value": tpot}]

        async def one(name: str) -> None:
            await self._api.patch_namespaced_custom_object(*_KIND, name, patch)

        await _together(one, names)

    async def until(self, holds: Callable[[Seen], bool], names: Sequence[str], limit_s: float) -> float:
        """How long it took until it held for all of them together. Raises AssertionError at the limit."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(limit_s):
                while not all(name in self.seen and holds(self.seen[name]) for name in names):
                    self.heard.clear()
                    if self.following.done():
                        self.following.result()
                    await self.heard.wait()
        except TimeoutError:
            late = [name for name in names if name not in self.seen or not holds(self.seen[name])]
            raise AssertionError(f"not within {limit_s:.0f} s: {len(late)} services, such as {late[:3]}") from None
        return self._clock() - began_s

    async def follow(self) -> None:
        """Until cancelled. A watch that ends, or a kind not served yet, means to list anew."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, ApiException):
                await self._list_and_watch()
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def _list_and_watch(self) -> None:
        listing = self._api.list_namespaced_custom_object
        listed = await listing(*_KIND)
        for raw in listed["items"]:
            self._saw(raw)
        async with watch.Watch() as stream:
            version = listed["metadata"]["resourceVersion"]
            async for event in stream.stream(listing, *_KIND, resource_version=version):
                self._saw(event["raw_object"])

    def _saw(self, raw: Mapping[str, Any]) -> None:
        name, seen, now_s = raw["metadata"]["name"], Seen.of(raw), self._clock()
        self.seen[name] = seen
        if seen.owners:
            self.placed_s.setdefault(name, now_s)
        if seen.ready:
            self.ready_s.setdefault(name, now_s)
        self.heard.set()


@asynccontextmanager
async def services(kubeconfig: Path) -> AsyncIterator[Services]:
    settings = Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=settings)
    async with ApiClient(settings) as client:
        client.user_agent = "scale-test"
        made = Services(client)
        made.following = asyncio.create_task(made.follow())
        made.following.add_done_callback(lambda _: made.heard.set())
        try:
            yield made
        finally:
            made.following.cancel()
            await asyncio.gather(made.following, return_exceptions=True)


async def _together(one: Callable[[str], Any], names: Sequence[str]) -> None:
    room = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(name: str) -> None:
        async with room:
            await one(name)

    await asyncio.gather(*map(in_turn, names))
