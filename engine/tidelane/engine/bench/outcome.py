"""What became of one request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from tidelane.engine.bench.traffic import Arrival
from tidelane.engine.slo import Timeline


class Failure(StrEnum):
    REFUSED = "refused"  # 429 or 503: the server said not now
    BAD_REQUEST = "bad request"  # any other 4xx
    SERVER_ERROR = "server error"  # any other status that is not 200
    STREAM_ERROR = "error in stream"  # the stream ended with an error event
    BROKEN_STREAM = "broken stream"  # the stream ended without saying so, or held something else than events
    NO_CONNECTION = "no connection"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are seconds since the start of the run.

    `sent_s` against `arrival.at_s` is how late the generator was, which is no fault of the server's. `token_times_s`
    has one entry for each piece of the stream that carried tokens; `output_tokens` counts tokens, by the server's usage
    if it reports it, else by pieces. `failure` None: the answer came whole.
    """

    arrival: Arrival
    sent_s: float
    ended_s: float
    token_times_s: tuple[float, ...] = ()
    input_tokens: int | None = None
    output_tokens: int = 0
    failure: Failure | None = None
    detail: str = ""

    @property
    def lateness_s(self) -> float:
        return self.sent_s - self.arrival.at_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Waits between two pieces of the stream that carried tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))

    def timeline(self) -> Timeline | None:
        """From sending to the last token; None unless the answer came whole and held a token.

        A client cannot see when prefill started, so the timeline says at once.
        """
        if self.failure is not None or not self.token_times_s:
            return None
        return Timeline(
            arrival_s=self.sent_s,
            prefill_start_s=self.sent_s,
            first_token_s=self.token_times_s[0],
            last_token_s=self.token_times_s[-1],
            input_tokens=self.arrival.input_tokens if self.input_tokens is None else self.input_tokens,
            output_tokens=self.output_tokens,
            longest_gap_s=max(self.gaps_s, default=0.0),
        )
