"""Drawing tokens from logits.

Order as in vLLM and transformers: log-probabilities are read from the raw logits; then bias and penalties, temperature,
top-k, top-p, min-p, and the draw. A draw needs one uniform number, which is a hash of (seed, position): so a seeded
request gives the same tokens alone, in any batch, and again after a pre-emption, and no generator state is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from tidelane.engine.request import NewToken, Sampling, TokenLogprob

# A temperature below this is greedy, and one that rounds to 0 in float32 would divide by it.
COLDEST = 1e-5
# Penalties and biases may overflow; beyond this, softmax sees no difference anyway.
LARGEST_LOGIT = 1e30


def sample(
    logits: torch.Tensor,  # [n, vocab], float32; overwritten
    requests: Sequence[Sampling],
    tokens: Sequence[Sequence[int]],
    output_counts: Sequence[Mapping[int, int]],
) -> list[NewToken | None]:
    """The next token of each row. `tokens` are each sequence's prompt and output; `output_counts` counts the output.

    None where the logits are not numbers. Rows that want nothing special are drawn together by one argmax.
    """
    highest = logits.argmax(dim=-1, keepdim=True)
    best = highest.squeeze(-1).tolist()
    # To argmax nothing is greater than what is not a number, so one such logit shows here.
    broken = torch.isnan(logits.gather(-1, highest)).squeeze(-1).tolist()
    drawn: list[NewToken | None] = []
    for row, request in enumerate(requests):
        if broken[row]:
            drawn.append(None)
            continue
        # Before anything is written over: reported log-probabilities are the model's own.
        logprobs = torch.log_softmax(logits[row], dim=-1) if request.logprobs is not None else None
        token = best[row]
        if _changes_logits(request):
            _shift(logits[row], request, tokens[row], output_counts[row])
            token = int(logits[row].argmax())
        if request.temperature > 0:
            token = _draw(logits[row], request, position=len(tokens[row]))
        drawn.append(NewToken(token, logprob_of(logprobs, token, request.logprobs or 0)))
    return drawn


def is_plain(request: Sampling) -> bool:
    """The likeliest token and nothing else: `sample` would give the argmax of the logits as they are."""
    return request.temperature <= 0 and request.logprobs is None and not _changes_logits(request)


def logprob_of(logprobs: torch.Tensor | None, token_id: int, alternatives: int) -> TokenLogprob | None:
    """The report on one token from its row of log-probabilities [vocab]; None when there is none."""
    if logprobs is None:
        return None
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = logprobs.topk(min(alternatives, logprobs.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a pure function of its arguments: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _changes_logits(request: Sampling) -> bool:
    return bool(
        request.logit_bias or request.repetition_penalty != 1.0 or request.presence_penalty or request.frequency_penalty
    )


def _shift(row: torch.Tensor, request: Sampling, tokens: Sequence[int], counts: Mapping[int, int]) -> None:
    """Bias and penalties, in place. Repetition (CTRL, arXiv 1909.05858) counts prompt and output; presence and
    frequency (OpenAI's API reference) the output alone."""
    if request.logit_bias:
        ids = torch.tensor([token for token, _ in request.logit_bias], device=row.device)
        row[ids] += torch.tensor([bias for _, bias in request.logit_bias], device=row.device)
    if request.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / request.repetition_penalty, values * request.repetition_penalty)
    if counts and (request.presence_penalty or request.frequency_penalty):
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor([float(n) for n in counts.values()], device=row.device)
        row[ids] -= request.presence_penalty + request.frequency_penalty * times
    row.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)


def _draw(row: torch.Tensor, request: Sampling, position: int) -> int:
    """One token from the row's logits [vocab], by inverting the cumulative distribution of what the filters leave.

    The likeliest token always stays, whatever the filters round to.
    """
    # The maximum first: dividing by a tiny temperature then gives 0 and -inf, which is greedy, never inf - inf.
    row = (row - row.max()) / max(request.temperature, COLDEST)
    ids: torch.Tensor | None = None
    if request.top_k is not None and request.top_k < row.shape[0]:
        row, ids = row.topk(request.top_k)  # sorted, highest first
    elif request.top_p < 1.0:
        row, ids = row.sort(descending=True)
    probabilities = torch.softmax(row, dim=-1)
    if request.top_p < 1.0:
        # Keep a token if those before it do not reach top_p yet.
        kept = probabilities.cumsum(dim=-1) - probabilities < request.top_p
        kept[0] = True  # top_p may round to 0 in float32
        probabilities = torch.where(kept, probabilities, 0.0)
    if request.min_p > 0:
        probabilities = torch.where(probabilities >= request.min_p * probabilities.max(), probabilities, 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    target = uniform(request.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    index = min(index, int(probabilities.nonzero()[-1]))
    return int(ids[index]) if ids is not None else index
