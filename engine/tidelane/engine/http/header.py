"""What all chunks of one answer have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidelane.engine.http.choice import Choice
from tidelane.engine.http.fields import Body
from tidelane.engine.http.shapes import Usage


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    id: str
    created: int  # Unix seconds
    model: str
    tier: str
    choices_per_prompt: int
    include_usage: bool
    continuous_usage: bool  # usage so far in every chunk

    @classmethod
    def of(cls, call_id: str, created: int, body: Body) -> AnswerHeader:
        options = body.stream_options
        return cls(
            id=call_id,
            created=created,
            model=body.model,
            tier=body.tier.value,
            choices_per_prompt=body.n,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
        )

    def usage(self, choices: Sequence[Choice]) -> Usage:
        return Usage.of(choices, self.choices_per_prompt)
