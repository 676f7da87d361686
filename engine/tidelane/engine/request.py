"""What a request is, once parsed: frozen, free of torch, of HTTP and of clocks.

The HTTP front makes these; the loop, the scheduler, the sampler and the simulator read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ServiceTier(StrEnum):
    """OpenAI's `service_tier`; `flex` work fills what interactive work leaves."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"

    @property
    def rank(self) -> int:
        """0 is served first."""
        return _RANKS[self]


_RANKS = {ServiceTier.PRIORITY: 0, ServiceTier.DEFAULT: 1, ServiceTier.FLEX: 2}
FLEX_RANK = ServiceTier.FLEX.rank


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Ranges are checked at the HTTP edge.

    `temperature` 0 is greedy. `top_k` None and `top_p` 1.0 keep every token. `logprobs` is how many alternatives to
    report with each token: None for no log-probabilities, 0 for the chosen token's alone. `prompt_logprobs` asks the
    same of the prompt's tokens. `logit_bias` holds (token id, bias) pairs.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    `stop_token_ids` end it (the front puts the model's end-of-text tokens here unless the client said `ignore_eos`);
    stop *strings* are the front's affair, which sees text. `max_new_tokens` may be 0 when only prompt log-probabilities
    are wanted. `arrival_s` is CLOCK_MONOTONIC, which all processes of a machine share. `ttft_s` and `tpot_s` override
    the service's targets for this request. Only requests of the same `cache_salt` share KV.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    arrival_s: float
    stop_token_ids: tuple[int, ...] = ()
    tier: ServiceTier = ServiceTier.DEFAULT
    ttft_s: float | None = None
    tpot_s: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, of natural base, and of the likeliest alternatives (highest first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class NewToken:
    """One generated token; `logprob` only if the request asked."""

    token_id: int
    logprob: TokenLogprob | None = None
