"""What a request says that matters to the choice of a backend. Lenient: what is wrong, the backend refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidelane.engine.request import ServiceTier
from tidelane.router.prefixes import CHARS_PER_TOKEN, Name, chat_text, names_of_text, names_of_tokens


@dataclass(frozen=True, slots=True)
class Ask:
    """`prompt_tokens` is an estimate by length, of all prompts together (copies share their KV); `names` are of the
    first prompt.

    `model` None: none was named, which every backend refuses in the same words. `ttft_s` and `tpot_s` are the request's
    own targets; None: the backend's. `home` decides between equals, the same in every router.
    """

    model: str | None
    tier: ServiceTier
    prompt_tokens: int
    names: tuple[Name, ...] = ()
    ttft_s: float | None = None
    tpot_s: float | None = None
    home: bytes = b""


def ask_of(fields: Mapping[str, Any], headers: Mapping[str, str], request_id: bytes) -> Ask:
    """`fields` are those of a body for either completion route."""
    model = fields.get("model")
    named = model if isinstance(model, str) else None
    salt = fields.get("cache_salt")
    start = f"{named}\0{salt if isinstance(salt, str) else ''}\0".encode(errors="replace")
    names, prompt_tokens = _prompt(fields, start)
    return Ask(
        model=named,
        tier=_tier(fields.get("service_tier")),
        prompt_tokens=prompt_tokens,
        names=names,
        ttft_s=_target_s(headers.get("x-slo-ttft-ms")),
        tpot_s=_target_s(headers.get("x-slo-tpot-ms")),
        home=names[0] if names else request_id,
    )


def _prompt(fields: Mapping[str, Any], start: bytes) -> tuple[tuple[Name, ...], int]:
    if "messages" in fields:
        return _one(chat_text(fields["messages"]), start)
    prompt = fields.get("prompt")
    if not isinstance(prompt, list) or _is_ids(prompt):
        return _one(prompt, start)
    if not prompt:
        return (), 1
    names, tokens = _one(prompt[0], start)
    return names, tokens + sum(_size(each) for each in prompt[1:])


def _one(prompt: Any, start: bytes) -> tuple[tuple[Name, ...], int]:
    text = prompt.encode(errors="replace") if isinstance(prompt, str) else prompt
    if isinstance(text, bytes):
        return names_of_text(text, start), _tokens(len(text))
    return (names_of_tokens(text, start), len(text)) if _is_ids(text) else ((), 1)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _size(prompt: Any) -> int:
    if isinstance(prompt, str):
        return _tokens(len(prompt))
    return len(prompt) if isinstance(prompt, list) else 1


def _tokens(chars: int) -> int:
    return max(1, math.ceil(chars / CHARS_PER_TOKEN))


def _tier(value: Any) -> ServiceTier:
    return ServiceTier(value) if value in (ServiceTier.PRIORITY, ServiceTier.FLEX) else ServiceTier.DEFAULT


def _target_s(text: str | None) -> float | None:
    try:
        value_ms = math.nan if text is None else float(text)
    except ValueError:
        return None
    return value_ms / 1000 if 0 < value_ms < math.inf else None
