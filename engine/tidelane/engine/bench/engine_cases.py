"""What the engine must show of itself, measured in this process: no HTTP in any of these.

Each case takes a loaded model, the cores to use and the number of rounds, and gives ratios.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from typing_extensions import override

from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.bench.ratio import Measured, Ratio, interleaved
from tidelane.engine.lanes.cores import CoreLane
from tidelane.engine.model.forward import Batch, SlicedModel
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.request import Request, Sampling
from tidelane.engine.slo import percentile
from tidelane.rpc.wire import ExecutionMode

PROMPT_TOKENS = 32
NEW_TOKENS = 48
TURNS = 12
TURN_TOKENS = 16
STREAMS = 8


def request(name: str, prompt_tokens: int, new_tokens: int) -> Request:
    """Greedy, and of exactly that length: nothing stops it."""
    # Any ids that each model has will do: the time of a step does not depend on which tokens they are.
    prompt = tuple(100 + (7 * i + sum(name.encode())) % 400 for i in range(prompt_tokens))
    return Request(name, prompt, new_tokens, Sampling(seed=0, temperature=0.0), arrival_s=time.monotonic())


class _Names:
    """Request ids that never come twice."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> str:
        self._next += 1
        return f"r{self._next}"


def single_stream(loaded: LoadedModel, cores: Sequence[int], rounds: int) -> list[Ratio]:
    """One sequence's decode against transformers' own `generate()`: same weights, dtype and worker threads.

    Both sides take turns every few tokens, and count by the median gap: the speed of memory on a shared machine changes
    by half within seconds.
    """
    names = _Names()
    generate = _Generate(loaded)
    over: list[float] = []
    under: list[float] = []
    with InProcessEngine(loaded, cores=cores) as engine:
        for _ in range(rounds + 1):
            ours_s: list[float] = []
            theirs_s: list[float] = []
            for _ in range(TURNS):
                name = names()
                engine.submit(request(name, PROMPT_TOKENS, TURN_TOKENS))
                engine.run()
                ours_s += _gaps_s(engine.token_times()[name])
                theirs_s += _gaps_s(generate.token_times(engine.lanes.decode(len(cores)), TURN_TOKENS))
            over.append(1 / median(ours_s))
            under.append(1 / median(theirs_s))
    # The first round warms both up.
    del over[0], under[0]
    unit = "tokens/s"
    return [
        Ratio(
            "single-stream decode over transformers generate()",
            Measured("ours", tuple(over), unit),
            Measured("generate()", tuple(under), unit),
            at_least=1.0,
        )
    ]


def _gaps_s(times_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times_s)]


class _Generate:
    """transformers' `generate()` on a second copy of the model, with the attention that it takes by default."""

    def __init__(self, loaded: LoadedModel) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            loaded.facts.folder, dtype=loaded.facts.dtype, attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None

    def token_times(self, lane: CoreLane, new_tokens: int) -> list[float]:
        """Runs on `lane`: a second team of threads would slow both down."""
        clock = _TokenClock()
        prompt = torch.tensor([request("reference", PROMPT_TOKENS, new_tokens).prompt])
        done = threading.Event()

        def work() -> None:
            self._model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
            done.set()

        lane.submit(work)
        done.wait()
        _, *times = clock.times_s  # the first call brings the prompt
        assert len(times) == new_tokens
        return times


class _TokenClock:
    """A streamer, as transformers calls what hears of each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.monotonic())

    def end(self) -> None:
        """Part of a streamer."""


def batching(loaded: LoadedModel, cores: Sequence[int], rounds: int) -> list[Ratio]:
    """Eight streams at once against the same eight one after another."""
    names = _Names()
    with InProcessEngine(loaded, cores=cores) as engine:

        def together() -> float:
            start_s = time.monotonic()
            for _ in range(STREAMS):
                engine.submit(request(names(), PROMPT_TOKENS, NEW_TOKENS))
            engine.run()
            return STREAMS * NEW_TOKENS / (time.monotonic() - start_s)

        def in_turn() -> float:
            start_s = time.monotonic()
            for _ in range(STREAMS):
                engine.submit(request(names(), PROMPT_TOKENS, NEW_TOKENS))
                engine.run()
            return STREAMS * NEW_TOKENS / (time.monotonic() - start_s)

        over, under = interleaved(together, in_turn, rounds)
    unit = "tokens/s"
    return [
        Ratio(
            "eight streams at once over one after another",
            Measured("at once", over, unit),
            Measured("in turn", under, unit),
            at_least=3.0,
        )
    ]


class _TimedModel(SlicedModel):
    """Adds up the time spent in the model itself, on whichever lane."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.busy_s = 0.0

    @override
    def embed(self, batch: Batch) -> torch.Tensor:
        start_s = time.monotonic()
        out = super().embed(batch)
        self.busy_s += time.monotonic() - start_s
        return out

    @override
    def run(self, hidden: torch.Tensor, batch: Batch, first: int, last: int) -> torch.Tensor:
        start_s = time.monotonic()
        out = super().run(hidden, batch, first, last)
        self.busy_s += time.monotonic() - start_s
        return out

    @override
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        start_s = time.monotonic()
        out = super().logits(hidden)
        self.busy_s += time.monotonic() - start_s
        return out


def loop_work(loaded: LoadedModel, cores: Sequence[int], rounds: int) -> list[Ratio]:
    """All of a decode step at batch 8 that is not the model: plan, commit, batch, sampling, waking threads."""
    names = _Names()
    model = _TimedModel(loaded.module)
    own_s: list[float] = []
    step_s: list[float] = []
    with InProcessEngine(loaded, cores=cores, model=model) as engine:
        for _ in range(rounds):
            ids = [names() for _ in range(STREAMS)]
            for name in ids:
                engine.submit(request(name, PROMPT_TOKENS, NEW_TOKENS))
            # Steady: past the prompts, and before the first stream ends.
            engine.run(until=lambda ids=ids: _all_decoding(engine, ids))  # type: ignore[misc]
            begun_s, busy_s, steps = time.monotonic(), model.busy_s, engine.ledger.steps
            engine.run(until=lambda first=steps: engine.ledger.steps >= first + NEW_TOKENS // 2)  # type: ignore[misc]
            done = engine.ledger.steps - steps
            step_s.append((time.monotonic() - begun_s) / done)
            own_s.append(step_s[-1] - (model.busy_s - busy_s) / done)
            engine.run()
    return [
        Ratio(
            f"the loop's own work over the step at batch {STREAMS}",
            Measured("own", tuple(1000 * each for each in own_s), "ms"),
            Measured("step", tuple(1000 * each for each in step_s), "ms"),
            at_most=0.05,
        )
    ]


def _all_decoding(engine: InProcessEngine, ids: Sequence[str]) -> bool:
    return all(engine.ledger.sequences[name].output_tokens >= 2 for name in ids if name in engine.ledger.sequences)


CHATS = 4
LONG_PROMPT_TOKENS = 2000
# Chats decode this many tokens before the long prompt comes, and go on until it is answered.
LEAD_TOKENS = 10


def lanes_against_mixed(loaded: LoadedModel, cores: Sequence[int], rounds: int) -> list[Ratio]:
    """Four chats decode when a long prompt arrives: waits between their tokens while it is prefilled, and its TTFT."""
    names = _Names()
    ttft_s: dict[ExecutionMode, list[float]] = {ExecutionMode.LANES: [], ExecutionMode.MIXED_BATCH: []}
    with InProcessEngine(loaded, cores=cores) as engine:

        def worst_wait_s(mode: ExecutionMode) -> float:
            engine.desk.mode = mode
            waits_s, first_token_s = _long_prompt_arrives(engine, names)
            ttft_s[mode].append(first_token_s)
            return percentile(waits_s, 99)

        worst_wait_s(ExecutionMode.LANES)  # so that each lane's speed is known, as in a running service
        ttft_s[ExecutionMode.LANES].clear()
        over, under = interleaved(
            lambda: worst_wait_s(ExecutionMode.MIXED_BATCH), lambda: worst_wait_s(ExecutionMode.LANES), rounds
        )
    lanes = Measured("TTFT lanes", tuple(ttft_s[ExecutionMode.LANES]), "s")
    mixed = Measured("mixed", tuple(ttft_s[ExecutionMode.MIXED_BATCH]), "s")
    return [
        Ratio(
            f"p99 token gap beside a {LONG_PROMPT_TOKENS}-token prompt, mixed over lanes",
            Measured("mixed", over, "s"),
            Measured("lanes", under, "s"),
            at_least=5.0,
            price=f"the prompt pays: {lanes}, {mixed}",
        )
    ]


def _long_prompt_arrives(engine: InProcessEngine, names: _Names) -> tuple[list[float], float]:
    """Waits between the chats' tokens that overlap the long prompt's prefill, and its TTFT."""
    chats = [names() for _ in range(CHATS)]
    long_prompt = names()
    for name in chats:
        engine.submit(request(name, PROMPT_TOKENS, 2000))
    engine.run(until=lambda: _spoken(engine, chats) >= LEAD_TOKENS)
    arrived_s = time.monotonic()
    engine.submit(request(long_prompt, LONG_PROMPT_TOKENS, 2))
    engine.run(until=lambda: long_prompt in engine.endings())
    for name in chats:
        engine.abort(name)
    engine.run()
    times = engine.token_times()
    answered_s = times[long_prompt][0]
    waits_s = [
        later - earlier
        for name in chats
        for earlier, later in pairwise(times[name])
        if later > arrived_s and earlier < answered_s
    ]
    return waits_s, answered_s - arrived_s


def _spoken(engine: InProcessEngine, ids: Sequence[str]) -> int:
    live = engine.ledger.sequences
    return min((live[name].output_tokens if name in live else 0) for name in ids)
