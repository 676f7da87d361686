"""Reading a request's body: bounded in size and time, and strict JSON.

msgspec refuses what Python's json module lets through and what then breaks elsewhere: NaN, 1e999, lone surrogates.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from tidelane.engine.http.errors import BadRequest, BodyTooLarge, BodyTooSlow, NotJson


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The JSON object in `request`'s body, its null fields left out: null means the same as absent to OpenAI."""
    return json_object(await read_body(request, max_bytes, timeout_s))


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """A body that says it is JSON."""
    # Asked for, rather than guessed: a browser may post text/plain to a loopback address from any page.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise NotJson(f"Send the header `Content-Type: application/json`; got {content_type[:80] or 'none'}.")
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"The body did not arrive within {timeout_s:g} s.") from None


def json_object(raw: bytes) -> dict[str, Any]:
    """Without its null fields. Raises BadRequest."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return {key: field for key, field in value.items() if field is not None}


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"The body is larger than {max_bytes} bytes.", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
