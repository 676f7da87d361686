"""From checked fields to the loop's requests: output budgets, seeds, stop tokens, and the headers' targets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidelane.engine.channel import Facts
from tidelane.engine.http.errors import BadRequest
from tidelane.engine.http.fields import Body
from tidelane.engine.request import Request, Sampling

# An hour: beyond it a "target" is a slip of units.
_MAX_TARGET_MS = 3_600_000.0
# Requests of one call; a longer list of prompts is better sent as several.
MAX_SEQUENCES = 512


@dataclass(frozen=True, slots=True)
class Targets:
    """A request's own latency targets; None: the service's."""

    ttft_s: float | None
    tpot_s: float | None

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Targets:
        return cls(_target_s(headers, "x-slo-ttft-ms"), _target_s(headers, "x-slo-tpot-ms"))


def _target_s(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = math.nan
    if not 0 < value_ms <= _MAX_TARGET_MS:
        raise BadRequest(
            f"The header `{name}` must be a number of milliseconds above 0 and up to {_MAX_TARGET_MS:.0f}; "
            f"got {text[:40]!r}.", param=name, code="invalid_value",
        )  # fmt: skip
    return value_ms / 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """What the parts of one HTTP request say together."""

    call_id: str
    arrival_s: float
    targets: Targets
    seed: int  # the client's, or a random one
    logprobs: int | None
    prompt_logprobs: int | None


def prompt_too_long(chars: int, facts: Facts, param: str) -> BadRequest:
    """What the client hears of a prompt whose length alone says that it exceeds the context."""
    return BadRequest(
        f"The model's context holds {facts.max_context_tokens} tokens; a prompt of {chars} characters needs more. "
        "Shorten the prompt.", param=param, code="context_length_exceeded",
    )  # fmt: skip


def output_budget(prompt_tokens: int, asked: int | None, default: int | None, facts: Facts, param: str) -> int:
    """How many tokens may be generated. Raises if the prompt, or what was asked beside it, exceeds the context.

    With `asked` None it is `default`, or without one all that the context and the KV pool leave.
    """
    limit = facts.max_context_tokens
    if prompt_tokens + (1 if asked is None else asked) > limit:
        output = "" if asked is None else f" and {asked} for the output"
        raise BadRequest(
            f"The model's context holds {limit} tokens; the request needs {prompt_tokens} for the prompt{output}. "
            "Shorten the prompt or ask for fewer tokens.", param=param, code="context_length_exceeded",
        )  # fmt: skip
    if asked is not None:
        return asked
    if default is not None:
        return min(default, limit - prompt_tokens)
    # What fits the device is not made to stream by a budget that nobody asked for.
    room = facts.kv_pool_tokens if prompt_tokens < facts.kv_pool_tokens else facts.kv_stream_tokens
    return max(1, min(limit, room) - prompt_tokens)


def requests_for(
    prompts: Sequence[tuple[int, ...]], budgets: Sequence[int], body: Body, asked: Asked, facts: Facts
) -> list[Request]:
    """`body.n` requests for each prompt, in order."""
    most = min(MAX_SEQUENCES, facts.queue_limit)
    if len(prompts) * body.n > most:
        raise BadRequest(
            f"The number of prompts times `n` must be at most {most}; got {len(prompts) * body.n}.",
            param="n", code="invalid_value",
        )  # fmt: skip
    for param, ids in (
        ("logit_bias", [token for token, _ in body.logit_bias]),
        ("stop_token_ids", body.stop_token_ids),
    ):
        for token_id in ids:
            if token_id >= facts.vocab_size:
                raise BadRequest(
                    f"Token id {token_id} is outside the vocabulary of {facts.vocab_size} tokens.",
                    param=param, code="invalid_value",
                )  # fmt: skip
    stop_ids = (*body.stop_token_ids, *(() if body.ignore_eos else facts.stop_token_ids))
    requests = []
    for number, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        for copy in range(body.n):
            index = number * body.n + copy
            requests.append(
                Request(
                    id=f"{asked.call_id}-{index}",
                    prompt=prompt,
                    max_new_tokens=budget,
                    # Each copy draws its own numbers, and the same ones again for the same seed.
                    sampling=_sampling(body, asked, seed=_seed(asked.seed, copy)),
                    arrival_s=asked.arrival_s,
                    stop_token_ids=tuple(dict.fromkeys(stop_ids)),
                    tier=body.tier,
                    ttft_s=asked.targets.ttft_s,
                    tpot_s=asked.targets.tpot_s,
                    cache_salt=body.cache_salt,
                )
            )
    return requests


def _seed(asked: int, copy: int) -> int:
    """Far from the seeds of any other pair: with `asked + copy`, seed 1's second copy would be seed 2's first."""
    if copy == 0:
        return asked % 2**63
    digest = hashlib.blake2b(f"{asked} {copy}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


def _sampling(body: Body, asked: Asked, seed: int) -> Sampling:
    return Sampling(
        seed=seed,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
    )
