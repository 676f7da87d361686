"""Which headers go through: all but those of one connection (RFC 9110, section 7.6.1) and those written anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Header = tuple[bytes, bytes]

_OF_A_CONNECTION: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# The body is whole by the time it goes on, so that nobody waits for a 100.
_OF_A_REQUEST: Final = frozenset((b"host", b"content-length", b"expect", b"x-request-id"))
# The server before the router writes these itself.
_OF_AN_ANSWER: Final = frozenset((b"date", b"server", b"x-request-id"))


def to_backend(headers: Iterable[Header], request_id: bytes) -> list[Header]:
    return [*_end_to_end(headers, _OF_A_REQUEST), (b"x-request-id", request_id)]


def to_client(headers: Iterable[Header]) -> list[Header]:
    return _end_to_end(headers, _OF_AN_ANSWER)


def _end_to_end(headers: Iterable[Header], without: frozenset[bytes]) -> list[Header]:
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        each.strip().lower() for name, value in lowered if name == b"connection" for each in value.split(b",") if each
    }
    return [(name, value) for name, value in lowered if name not in _OF_A_CONNECTION | without | named]
