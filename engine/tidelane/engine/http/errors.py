"""What a client is told when it gets no answer, named by what it should do next, in OpenAI's error shape."""

from __future__ import annotations

import math
from typing import Any

import msgspec


class ApiError(Exception):
    """Base of every refusal. `param` is the field at fault; `code` is for programs, `message` for people."""

    status = 500
    type = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        # Whole seconds, as HTTP has it; 0 would invite a retry storm.
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class BadRequest(ApiError):
    """The request must change before it can be served."""

    status = 400
    type = "invalid_request_error"


class NoSuchThing(ApiError):
    """The route or the model does not exist."""

    status = 404
    type = "invalid_request_error"


class BodyTooLarge(BadRequest):
    status = 413


class BodyTooSlow(BadRequest):
    status = 408


class NotJson(BadRequest):
    status = 415


class Busy(ApiError):
    """Too many requests at once; come again after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"


class Unavailable(ApiError):
    """This server cannot serve now: it loads, drains or has lost its engine."""

    status = 503
    type = "service_unavailable"


class EngineFailed(ApiError):
    """The engine could not finish this request; others may go on."""

    status = 500
    type = "server_error"


class SlowReader(ApiError):
    """The client did not read its stream, and what it had not read grew past the bound."""

    status = 503
    type = "server_error"
