"""The ASGI application: the routes, and every failure in OpenAI's shape."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tidelane.engine.http.edge import Edge
from tidelane.engine.http.errors import ApiError, EngineFailed
from tidelane.engine.http.routes import routes
from tidelane.engine.http.service import Service


def build_app(service: Service) -> ASGIApp:
    # No framework on top: bodies are read by hand, so that every refusal has OpenAI's shape.
    app = Starlette(routes=routes(service))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    # Starlette answers with this and raises on, so that the server logs the traceback.
    app.add_exception_handler(Exception, _bug)
    return Edge(app, service.metrics, service.monotonic_s, service.random_bits)


def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers(), "application/json")


def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    shaped = ApiError(f"{request.method} {request.url.path[:200]}: {error.detail}", code="unknown_route")
    shaped.type = "invalid_request_error"
    return Response(shaped.body(), error.status_code, error.headers, "application/json")


def _bug(request: Request, _: Exception) -> Response:
    return _api_error(request, EngineFailed("The server failed on this request.", code="internal_error"))
