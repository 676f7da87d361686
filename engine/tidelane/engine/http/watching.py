"""What watches a process asks of it: whether it lives, whether it takes requests, and its figures."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def watching_routes(unready: Callable[[], str | None], exposition: Callable[[], bytes]) -> list[Route]:
    """`unready` says why it takes no requests, None if it does; `exposition` is Prometheus' text."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        reason = unready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", metrics)]
