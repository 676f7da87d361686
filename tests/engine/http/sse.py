"""Reading server-sent events, by hand: the tests of streams must see what is really on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

DONE = "[DONE]"


def events(response: httpx.Response) -> Iterator[Any]:
    """Each event's JSON, or DONE. Fails on anything that is not an event."""
    return parse(response.iter_lines())


def parse(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        yield DONE if data == DONE else json.loads(data)


def chat_text(chunks: Iterable[Any]) -> str:
    return "".join(
        choice["delta"].get("content", "") for chunk in chunks if chunk != DONE for choice in chunk["choices"]
    )


def text(chunks: Iterable[Any], index: int = 0) -> str:
    return "".join(
        choice["text"] for chunk in chunks if chunk != DONE for choice in chunk["choices"] if choice["index"] == index
    )
