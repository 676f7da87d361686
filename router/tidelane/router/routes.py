"""The routes of a router: those of a front, asked of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from tidelane.engine.http.body import json_object, read_body
from tidelane.engine.http.client_watch import ClientWatch
from tidelane.engine.http.config import Limits
from tidelane.engine.http.edge import request_id
from tidelane.engine.http.errors import ApiError, Busy, NoSuchThing, Unavailable
from tidelane.engine.http.watching import watching_routes
from tidelane.router.ask import Ask, ask_of
from tidelane.router.client import NOBODY, Client
from tidelane.router.fleet import Fleet
from tidelane.router.headers import to_backend
from tidelane.router.metrics import Metrics
from tidelane.router.relay import Relay
from tidelane.router.upstream import Outgoing


class Router:
    """What every route works with. Lives on one event loop."""

    def __init__(
        self, fleet: Fleet, relay: Relay, metrics: Metrics, limits: Limits, monotonic_s: Callable[[], float]
    ) -> None:
        self.fleet = fleet
        self.relay = relay
        self.metrics = metrics
        self.limits = limits
        self.monotonic_s = monotonic_s
        self.draining = False
        self.open: set[Passage] = set()

    def check(self) -> None:
        """Raises what the client is to hear if no request can be taken."""
        if self.draining:
            raise Unavailable("This router finishes its work and stops.", code="draining", retry_after_s=1)
        if len(self.open) >= self.limits.open_calls:
            message = f"{len(self.open)} requests are open, the most this router takes."
            raise Busy(message, code="queue_full", retry_after_s=1)

    def unready(self) -> str | None:
        if self.draining:
            return "This router finishes its work and stops."
        if not self.fleet.healthy():
            return f"None of {len(self.fleet.backends)} backends takes requests."
        return None

    def check_model(self, ask: Ask) -> None:
        """Where every backend has said what it serves, a model that none does is refused here."""
        backends = self.fleet.backends.values()
        if backends and not any(each.serves(ask.model) for each in backends):
            names = ", ".join(map(repr, sorted(self.fleet.models())))
            raise NoSuchThing(
                f"The model {str(ask.model)[:200]!r} does not exist; this router serves {names}.",
                param="model", code="model_not_found",
            )  # fmt: skip

    def lose_open(self, error: ApiError) -> None:
        """Every request ends here."""
        for each in tuple(self.open):
            each.lose(error)


class Passage(Response):
    """One request from its body to the end of its answer. It ends at once when the client leaves."""

    def __init__(self, router: Router, ask: Ask, outgoing: Outgoing) -> None:
        self._router = router
        self._ask = ask
        self._outgoing = outgoing
        self._working: asyncio.Task[None] | None = None
        self._lost: ApiError | None = None
        self.background = None

    def lose(self, error: ApiError) -> None:
        self._lost = error
        self._cancel()

    def _cancel(self) -> None:
        if self._working is not None:
            self._working.cancel()

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send)
        watch = ClientWatch(receive)
        working = asyncio.create_task(self._router.relay.relay(self._ask, self._outgoing, client))
        self._working = working
        self._router.open.add(self)
        watch.when_gone(self._cancel)
        try:
            await working
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # it is we who are to end, and what we wait for has, too
                raise
            if self._lost is not None and not watch.gone:
                await self._break_off(client, self._lost)
            elif not client.begun:
                await client.whole(NOBODY, [], b"")
        finally:
            watch.stop()
            self._router.open.discard(self)

    async def _break_off(self, client: Client, error: ApiError) -> None:
        if not client.begun:
            raise error
        await client.break_off(error)


def routes(router: Router) -> list[Route]:
    async def passed_on(request: Request) -> Response:
        router.check()
        raw = await read_body(request, router.limits.body_bytes, router.limits.body_timeout_s)
        named = request_id(request.scope)
        ask = ask_of(json_object(raw), request.headers, named)
        router.check()  # once more: the body took its time
        router.check_model(ask)
        path = request.url.path.encode()
        query = request.scope["query_string"]
        target = path + b"?" + query if query else path
        headers = to_backend(request.scope["headers"], named)
        return Passage(router, ask, Outgoing("POST", target, headers, raw))

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_card(router, name) for name in sorted(router.fleet.models())]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in router.fleet.models():
            names = ", ".join(map(repr, sorted(router.fleet.models()))) or "none yet"
            raise NoSuchThing(
                f"The model {name[:200]!r} does not exist; this router serves {names}.",
                param="model", code="model_not_found",
            )  # fmt: skip
        return JSONResponse(_card(router, name))

    async def backends(_: Request) -> Response:
        return Response(msgspec.json.encode({"backends": _shown(router)}), media_type="application/json")

    return [
        Route("/v1/chat/completions", passed_on, methods=["POST"]),
        Route("/v1/completions", passed_on, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        *watching_routes(router.unready, router.metrics.exposition),
        Route("/debug/backends", backends),
    ]


def _card(router: Router, name: str) -> dict[str, Any]:
    """As a front's; of several replicas the eldest's time, and the shortest context, which every one of them takes."""
    loads = router.fleet.models()[name]
    card = {"id": name, "object": "model", "created": min(each.started_s for each in loads), "owned_by": "tidelane"}
    contexts = [each.max_context_tokens for each in loads if each.max_context_tokens]
    return {**card, "max_model_len": min(contexts)} if contexts else card


def _shown(router: Router) -> list[dict[str, Any]]:
    now_s = router.monotonic_s()
    return [
        {
            "name": name,
            "fitness": backend.fitness(now_s).name.lower(),
            "in_flight": backend.in_flight,
            "pace": backend.pace.factor(now_s),
            "ejected": backend.record.ejected(now_s),
            "load": backend.load,
        }
        for name, backend in sorted(router.fleet.backends.items())
    ]
