"""One request on its way: the mutable state that the loop alone writes and executors read while it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from tidelane.engine.kv.cache import Holding
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import Asker
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.request import FinishReason, NewToken, Request, TokenLogprob
from tidelane.engine.scheduling.plan import Decoding, Prefilling, Priority
from tidelane.engine.slo import Slo, Timeline


@dataclass(slots=True)
class StreamHolding:
    """What a sequence that streams holds for its life: a run of device blocks, once it is its turn, and slots of host
    memory, which are all there before its first pass."""

    run: StreamRun
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Sequence:
    """`tokens` is the prompt and all that was generated; the KV of the first `computed` of them is in `blocks`; or, if
    it streams, where `stream` says."""

    request: Request
    slo: Slo
    tokens: list[int] = field(init=False)
    priority: Priority = field(init=False)
    work_s: float = 0.0  # all of its prefill, on the whole device, as predicted
    computed: int = 0
    holding: Holding = field(default_factory=Holding)
    stream: StreamHolding | None = None
    # What its whole blocks are called, of prompt and answer. Of the first `settled` blocks it is known whether they
    # have names.
    keys: list[Key] = field(default_factory=list)
    settled: int = 0
    # For the cache; None before its prompt has been looked for there.
    asker: Asker | None = None
    # Its last prefill gave it a token. By the numbers alone one that was found but for one token looks the same.
    decodes: bool = False
    # Tokens that were there when it was admitted, last and first.
    found: int = 0
    found_at_first: int | None = None
    # How often each generated token came up: what the penalties of sampling read.
    output_counts: Counter[int] = field(default_factory=Counter)
    # Its view as of its last change: schedulers ask for all of them at each step, and a step changes a few.
    seen: Decoding | Prefilling | None = None
    prefill_start_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float = 0.0
    # How often the process that prefills ended while it was at this prompt.
    prefills_lost: int = 0
    # Of the prompt's tokens so far, when asked for; emptied once sent.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_sent: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.priority = (self.request.tier.rank, self.request.arrival_s, self.request.id)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def blocks(self) -> list[int]:
        return self.holding.blocks

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def ttft_due_s(self) -> float:
        return self.request.arrival_s + self.slo.ttft_target_s(len(self.request.prompt))

    def view(self) -> Decoding | Prefilling:
        """What schedulers see of it while it runs."""
        request, known, computed = self.request, len(self.tokens), self.computed
        if self.decodes:
            generated = known - len(request.prompt)
            first_s = self.first_token_s
            assert first_s is not None
            tpot_s = self.slo.tpot_s
            return Decoding(request.id, self.priority, computed, len(self.blocks), tpot_s, first_s + tpot_s * generated)
        left_s = self.work_s * (known - computed) / (known - self.found)
        return Prefilling(request.id, self.priority, known, computed, self.ttft_due_s, left_s)

    def append(self, new: NewToken, now_s: float) -> FinishReason | None:
        """Take the next token; the reason if it is the last."""
        self.tokens.append(new.token_id)
        self.decodes = True
        self.output_counts[new.token_id] += 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.last_token_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_token_s)
        self.last_token_s = now_s
        if new.token_id in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.output_tokens >= self.request.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def run_on(self, token_id: int, times_s: list[float]) -> None:
        """Take this token at each of these times, none of which is the last."""
        assert self.last_token_s is not None
        gaps_s = [later - earlier for earlier, later in pairwise((self.last_token_s, *times_s))]
        self.longest_gap_s = max(self.longest_gap_s, *gaps_s)
        self.last_token_s = times_s[-1]
        self.tokens += [token_id] * len(times_s)
        self.output_counts[token_id] += len(times_s)
        self.computed += len(times_s)
        self.seen = None

    def timeline(self) -> Timeline | None:
        """None until the first token."""
        if self.first_token_s is None or self.last_token_s is None or self.prefill_start_s is None:
            return None
        return Timeline(
            arrival_s=self.request.arrival_s,
            prefill_start_s=self.prefill_start_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            input_tokens=len(self.request.prompt),
            output_tokens=self.output_tokens,
            longest_gap_s=self.longest_gap_s,
        )
