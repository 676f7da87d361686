"""What can be read out of the messages that a loop has sent."""

from __future__ import annotations

from collections.abc import Iterable

from tidelane.engine.channel import Accepted, ToFront, Tokens


def answers(sent: Iterable[ToFront]) -> dict[str, list[int]]:
    """The tokens of each request so far, by its id."""
    tokens: dict[str, list[int]] = {}
    for message in sent:
        if isinstance(message, Accepted):
            tokens[message.request_id] = []
        elif isinstance(message, Tokens):
            tokens[message.request_id] += [new.token_id for new in message.new]
    return tokens


def token_times(sent: Iterable[ToFront]) -> dict[str, list[float]]:
    """When each token of each request was made known, in the loop's seconds."""
    times: dict[str, list[float]] = {}
    for message in sent:
        if isinstance(message, Tokens):
            times.setdefault(message.request_id, []).extend([message.time_s] * len(message.new))
    return times
