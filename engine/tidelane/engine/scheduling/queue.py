"""What prefill works on next: the parts of prompts that fit one pass, in order of priority."""

from __future__ import annotations

from collections.abc import Iterable

from tidelane.engine.scheduling.plan import Prefilling, Queued, Span


def next_spans(sequences: Iterable[Prefilling | Queued], max_tokens: int) -> tuple[Span, ...]:
    """Fill one pass of `max_tokens` tokens: whole prompts first come, and the last one cut if it does not fit.

    A prompt is cut only when it stands first; one that merely does not fit beside others waits for its own pass.
    """
    spans: list[Span] = []
    room = max_tokens
    for sequence in sequences:
        start = sequence.computed if isinstance(sequence, Prefilling) else 0
        left = sequence.tokens - start
        if left > room and spans:
            break
        spans.append(Span(sequence.id, start, start + min(left, room)))
        room -= spans[-1].tokens
        if room <= 0:
            break
    return tuple(spans)
