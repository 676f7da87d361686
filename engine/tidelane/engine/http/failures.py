"""Every failure in OpenAI's shape: refusals, unknown routes, bugs."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidelane.engine.http.errors import ApiError, EngineFailed


def add_failures(app: Starlette) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    # Starlette answers with this and raises on, so that the server logs the traceback.
    app.add_exception_handler(Exception, _bug)


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
