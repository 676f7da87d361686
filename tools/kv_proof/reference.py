"""What an engine without tiers answers, and how sure of it it was at each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.channel import Tokens
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.request import Request, Sampling
from tidelane.rpc.wire import ExecutionMode

# Log-probabilities of two tokens as close as this may change places if floats are summed in another order, which
# batches and chunks do (tests/engine/core/test_right_tokens.py).
TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Expected:
    """Token by token; `margins`: log-probability of each less that of the next best."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """How many tokens are equal; `tied` if the first that is not could be either."""

    equal: int
    tied: bool
    wrong: bool


def match(got: Sequence[int], expected: Expected) -> Match:
    """What has come so far, against the beginning of what was expected."""
    if len(got) > len(expected.tokens):
        return Match(len(expected.tokens), tied=False, wrong=True)
    pairs = zip(got, expected.tokens, strict=False)
    at = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(got))
    tied = at < len(got) and expected.margins[at] <= TIE
    return Match(at, tied, wrong=at < len(got) and not tied)


class Reference:
    """An engine with nothing below its pool that shares no blocks: all is computed anew."""

    def __init__(self, loaded: LoadedModel, cores: Sequence[int], banned: Sequence[int]) -> None:
        self._banned = tuple((token, -100.0) for token in banned)
        self._engine = InProcessEngine(loaded, cores=cores, mode=ExecutionMode.MIXED_BATCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def answers(self, prompts: Sequence[tuple[tuple[int, ...], int]]) -> list[Expected]:
        """To prompts, each with how many tokens are to be answered."""
        engine = self._engine
        engine.desk.sent.clear()
        sampling = Sampling(seed=0, temperature=0.0, logit_bias=self._banned, logprobs=2)
        for number, (prompt, new_tokens) in enumerate(prompts):
            engine.submit(Request(str(number), prompt, new_tokens, sampling, arrival_s=float(number)))
        engine.run()
        tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        margins: dict[str, list[float]] = {name: [] for name in tokens}
        for message in [each for each in engine.desk.sent if isinstance(each, Tokens)]:
            for new in message.new:
                assert new.logprob is not None
                (_, best), (_, second) = new.logprob.top
                tokens[message.request_id].append(new.token_id)
                margins[message.request_id].append(best - second)
        return [Expected(tuple(tokens[name]), tuple(margins[name])) for name in tokens]
