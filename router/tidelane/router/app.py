"""The ASGI application: the routes, and every failure in OpenAI's shape, as a front has it."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.types import ASGIApp

from tidelane.engine.http.edge import Edge
from tidelane.engine.http.failures import add_failures
from tidelane.router.routes import Router, routes


def build_app(router: Router, random_bits: Callable[[int], int]) -> ASGIApp:
    app = Starlette(routes=routes(router))
    add_failures(app)
    return Edge(app, router.metrics, router.monotonic_s, random_bits)
