"""The test stand: launches probes on an executor, as the loop launches plans, and reads how long they took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tidelane.engine.execution.executor import Completion, Executor
from tidelane.engine.kv.cache import Holding
from tidelane.engine.profiling.probes import Probe
from tidelane.engine.request import Request, Sampling
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice, Span
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo

# Steps timed alone, before a pass comes beside them and once more after it.
STEPS_ALONE = 2
_NO_SLO = Slo(ttft_s=1.0, tpot_s=1.0)


class LaunchFailed(RuntimeError):
    """The executor could not run a probe: the message says why."""


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """What decode and prefill took side by side, over what they took alone a moment before and after."""

    decode: float
    prefill: float


class Stand:
    """`sequences` is the mapping that `executor` reads; `wait` returns once something has ended since the last poll.

    Sequences hold blocks from the first on, so those must be free, and tokens from 1 to `vocab_size` - 1.
    """

    def __init__(
        self,
        executor: Executor,
        sequences: dict[str, Sequence],
        wait: Callable[[], None],
        *,
        layers: int,
        block_tokens: int,
        vocab_size: int,
    ) -> None:
        self._executor = executor
        self._sequences = sequences
        self._wait = wait
        self._layers = layers
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._jobs = 0

    def seconds(self, probe: Probe) -> float:
        """Of one launch, alone on the device. For any kind but `beside`."""
        self._fill(probe)
        return _seconds(self._run(probe))

    def slowdowns(self, probe: Probe) -> Slowdowns | None:
        """Steps, one after another, beside one pass; None if not one step lay within it."""
        self._fill(probe)
        step = Probe(probe.partition, contexts=probe.contexts)
        prompt = Probe(probe.partition, spans=probe.spans)
        steps_alone_s = [_seconds(self._run(step)) for _ in range(STEPS_ALONE)]
        pass_alone_s = _seconds(self._run(prompt))
        steps, beside = self._side_by_side(probe)
        steps_alone_s += [_seconds(self._run(step)) for _ in range(STEPS_ALONE)]
        steps_s = [_seconds(each) for each in steps if each.ended_s <= beside.ended_s]
        if not steps_s:
            return None
        return Slowdowns(median(steps_s) / median(steps_alone_s), _seconds(beside) / pass_alone_s)

    def _side_by_side(self, probe: Probe) -> tuple[list[Completion], Completion]:
        """The steps that began during the pass, and the pass."""
        self._executor.launch(self._plan(probe))
        steps: list[Completion] = []
        passed: Completion | None = None
        stepping = True
        while stepping or passed is None:
            for completion in self._ended():
                if completion.prefill is not None:
                    passed = completion
                else:
                    steps.append(completion)
                    stepping = False
            if not stepping and passed is None:
                self._executor.launch(self._plan(Probe(probe.partition, contexts=probe.contexts)))
                stepping = True
        return steps, passed

    def _run(self, probe: Probe) -> Completion:
        self._executor.launch(self._plan(probe))
        (completion,) = self._ended()
        return completion

    def _ended(self) -> list[Completion]:
        """What has ended, once something has."""
        while not (ended := [event for event in self._executor.poll() if isinstance(event, Completion)]):
            self._wait()
        for completion in ended:
            if completion.failure is not None:
                raise LaunchFailed(completion.failure)
        return ended

    def _plan(self, probe: Probe) -> Plan:
        decode = DecodeBatch(tuple(f"d{at}" for at in range(len(probe.contexts)))) if probe.contexts else None
        prefill = None
        if probe.spans:
            self._jobs += 1
            spans = tuple(Span(f"p{at}", start, stop) for at, (start, stop) in enumerate(probe.spans))
            prefill = PrefillSlice(self._jobs, spans, 0, self._layers)
        return Plan(probe.partition, decode=decode, prefill=prefill, fused=probe.fused)

    def _fill(self, probe: Probe) -> None:
        """The sequences that the probe's launches name, each with blocks of its own, all adjacent."""
        self._sequences.clear()
        block = 0
        for at, context in enumerate(probe.contexts):
            block = self._add(f"d{at}", context, context + 1, block)
        for at, (start, stop) in enumerate(probe.spans):
            block = self._add(f"p{at}", start, stop, block)

    def _add(self, name: str, computed: int, tokens: int, block: int) -> int:
        """The first block after its own."""
        # Any ids will do: times do not depend on which tokens they are. Greedy, as every row of logits goes through
        # that at least.
        prompt = tuple(1 + at % (self._vocab_size - 1) for at in range(tokens))
        request = Request(name, prompt, 1, Sampling(seed=0, temperature=0.0), arrival_s=0.0)
        end = block + -(-tokens // self._block_tokens)
        self._sequences[name] = Sequence(request, _NO_SLO, computed=computed, holding=Holding(list(range(block, end))))
        return end


def _seconds(completion: Completion) -> float:
    return completion.ended_s - completion.started_s
