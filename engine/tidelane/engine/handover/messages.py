"""What the two sides say to each other. Slices go one at a time: the next after the completion of the one before."""

from __future__ import annotations

import msgspec

from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.execution.executor import Completion
from tidelane.engine.kv.cache import Holding
from tidelane.engine.request import Request
from tidelane.engine.scheduling.plan import PrefillSlice
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo

# ---- decode side -> prefill side -----------------------------------------------------------------------------------


class Prompt(msgspec.Struct, frozen=True):
    """One sequence of a slice: all of it that prefill reads. `generated` is there after a pre-emption."""

    request: Request
    slo: Slo
    generated: tuple[int, ...]
    blocks: tuple[int, ...]
    prompt_logprobs_sent: bool

    @staticmethod
    def of(sequence: Sequence) -> Prompt:
        generated = tuple(sequence.tokens[len(sequence.request.prompt) :])
        return Prompt(sequence.request, sequence.slo, generated, tuple(sequence.blocks), sequence.prompt_logprobs_sent)

    def sequence(self) -> Sequence:
        sequence = Sequence(self.request, self.slo)
        sequence.tokens += self.generated
        sequence.output_counts.update(self.generated)
        sequence.holding = Holding(list(self.blocks))
        sequence.prompt_logprobs_sent = self.prompt_logprobs_sent
        return sequence


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Prefill `part`, and hand its KV over layer by layer. Until its completion the blocks are the prefill side's."""

    part: PrefillSlice
    units: int
    prompts: tuple[Prompt, ...]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop the activations of a pass that will not go on."""

    job: int


ToPrefill = Compute | Forget


# ---- prefill side -> decode side -----------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first message: the model is loaded and warm, and passes take so long."""

    times: PassTimes


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The first message and the last: it can never prefill as asked."""

    reason: str


class Computed(msgspec.Struct, frozen=True, tag=True):
    """The KV of the slice is in the decode side's pool, unless `completion` tells of a failure."""

    completion: Completion


FromPrefill = Ready | Unable | Computed
