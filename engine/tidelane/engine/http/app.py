"""The ASGI application: the routes, and every failure in OpenAI's shape."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp

from tidelane.engine.http.edge import Edge
from tidelane.engine.http.failures import add_failures
from tidelane.engine.http.routes import routes
from tidelane.engine.http.service import Service


def build_app(service: Service) -> ASGIApp:
    # No framework on top: bodies are read by hand, so that every refusal has OpenAI's shape.
    app = Starlette(routes=routes(service))
    add_failures(app)
    return Edge(app, service.metrics, service.monotonic_s, service.random_bits)
