"""What any executor makes of a launch: which rows of which sequences to compute, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch

from tidelane.engine.execution.executor import Sampled
from tidelane.engine.model.batch import Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.sampling import logprob_of, sample
from tidelane.engine.request import NewToken, TokenLogprob
from tidelane.engine.scheduling.plan import DecodeBatch, PrefillSlice, Span
from tidelane.engine.sequence import Sequence

# Rows of logits made at a time for prompt log-probabilities: [256, vocab] floats at once, not [prompt, vocab].
LOGIT_ROWS = 256


def computed_spans(
    sequences: Mapping[str, Sequence], decode: DecodeBatch | None, prefill: PrefillSlice | None
) -> list[Span]:
    """What a launch computes, in the order of its rows: decode first."""
    steps = [] if decode is None else [sequences[i] for i in decode.ids]
    spans = [Span(sequence.id, sequence.computed, sequence.computed + 1) for sequence in steps]
    return spans if prefill is None else [*spans, *prefill.spans]


def rows_of(sequences: Mapping[str, Sequence], span: Span) -> Rows:
    sequence = sequences[span.id]
    holding = sequence.holding
    return Rows(sequence.tokens[span.start : span.stop], span.start, holding.blocks, holding.arrivals)


def outcome(
    model: SlicedModel, sequences: Mapping[str, Sequence], spans: list[Span], hidden: torch.Tensor
) -> tuple[Sampled, ...]:
    """Sample whoever is due a token. `hidden` [rows, hidden size] has left the last layer."""
    theirs = [sequences[span.id] for span in spans]
    ends = list(accumulate(span.tokens for span in spans))
    reports = [
        _prompt_logprobs(model, sequence, span, hidden[end - span.tokens : end])
        for sequence, span, end in zip(theirs, spans, ends, strict=True)
    ]
    due = [
        i
        for i, (sequence, span) in enumerate(zip(theirs, spans, strict=True))
        if span.stop == len(sequence.tokens) and sequence.request.max_new_tokens > 0
    ]
    drawn = draw(model.logits(hidden[[ends[i] - 1 for i in due]]), [theirs[i] for i in due]) if due else []
    tokens = dict(zip(due, drawn, strict=True))
    return tuple(
        Sampled(span.id, tokens.get(i), reports[i], failed=i in tokens and tokens[i] is None)
        for i, span in enumerate(spans)
    )


def draw(logits: torch.Tensor, sequences: list[Sequence]) -> list[NewToken | None]:
    """The next token of each sequence from its row of `logits`, which are overwritten."""
    return sample(
        logits,
        [sequence.request.sampling for sequence in sequences],
        [sequence.tokens for sequence in sequences],
        [sequence.output_counts for sequence in sequences],
    )


def _prompt_logprobs(
    model: SlicedModel, sequence: Sequence, span: Span, hidden: torch.Tensor
) -> tuple[TokenLogprob | None, ...] | None:
    """Log-probabilities of prompt tokens [start, stop), shifted by one: a row tells about the token after it.

    The first token of the prompt has none. `hidden` [span.tokens, hidden size].
    """
    alternatives = sequence.request.sampling.prompt_logprobs
    prompt = sequence.request.prompt
    if alternatives is None or span.start >= len(prompt) or sequence.prompt_logprobs_sent:
        return None
    report: list[TokenLogprob | None] = [None] if span.start == 0 else []
    targets = prompt[span.start + 1 : span.stop + 1]
    for first in range(0, len(targets), LOGIT_ROWS):
        chunk = targets[first : first + LOGIT_ROWS]
        rows = torch.log_softmax(model.logits(hidden[first : first + len(chunk)]), dim=-1)
        report += [logprob_of(row, token, alternatives) for row, token in zip(rows, chunk, strict=True)]
    return tuple(report)
