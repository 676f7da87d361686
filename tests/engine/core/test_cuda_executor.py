"""The CUDA executor with a GPU that keeps a diary: the order of waits, what completes when, and the right tokens.

What only a GPU can show is in tools/gpu/check.sh.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typing_extensions import override

from tidelane.engine.bench.rig import Rig
from tidelane.engine.errors import EngineStuck
from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.execution.cuda import CudaExecutor, Fences, Lane
from tidelane.engine.execution.executor import Completion
from tidelane.engine.execution.graphs import DecodeSteps, StepBuffers, buckets
from tidelane.engine.kv.cache import Holding
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.partition import Partition, PartitionTable, partition_table
from tidelane.engine.model.attention_cuda import NAME, PLAIN, register
from tidelane.engine.model.forward import Batch, SlicedModel
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.request import Request, Sampling
from tidelane.engine.scheduling.plan import DecodeBatch, Objective, Plan, PrefillSlice, Span
from tidelane.engine.scheduling.policies import live_policies
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo

from .fake_gpu import FakeGpu, FakeLanes, FakeStream
from .models import FAMILIES, save

TABLE = partition_table(4)
BLOCKS = 400
MOST_TOKENS = 2048


def load_for_gpu(family: str, folder: Path) -> LoadedModel:
    loaded = load(save(family, folder), "float32", None, torch.device("cpu"))
    register()
    loaded.module.set_attn_implementation(NAME)
    return loaded


@dataclass
class Machine:
    """An executor with the CPU's memory and a diary."""

    loaded: LoadedModel
    gpu: FakeGpu
    table: PartitionTable = TABLE
    most_rows: int = 8
    model: SlicedModel | None = None

    def executor(self, sequences: Mapping[str, Sequence], notify: Callable[[], None]) -> CudaExecutor:
        facts = self.loaded.facts
        model = self.model or SlicedModel(self.loaded.module)
        pool = DevicePool.allocate(facts.kv_layout, BLOCKS + 1, facts.dtype, torch.device("cpu"))
        buffers = StepBuffers(pool, self.most_rows, MOST_TOKENS, facts.vocab_size)
        return CudaExecutor(
            gpu=self.gpu,
            model=model,
            pool=pool,
            kernels=PLAIN,
            lanes=FakeLanes(self.table, self.gpu),
            steps=DecodeSteps(model, pool, PLAIN, buffers, buckets(self.most_rows)),
            sequences=sequences,
            notify=notify,
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_for_gpu("llama", tmp_path_factory.mktemp("llama"))


def sequence(name: str, prompt: list[int], blocks: list[int], computed: int = 0) -> Sequence:
    request = Request(name, tuple(prompt), 10, Sampling(seed=0, temperature=0.0), arrival_s=0.0)
    return Sequence(request, Slo(1.0, 1.0), computed=computed, holding=Holding(blocks))


class Bench:
    """An executor driven by hand."""

    def __init__(self, machine: Machine) -> None:
        self.gpu = machine.gpu
        self.sequences: dict[str, Sequence] = {}
        self._ended = threading.Semaphore(0)
        self.executor = machine.executor(self.sequences, self._ended.release)

    def wait(self) -> Completion:
        assert self._ended.acquire(timeout=30)
        (completion,) = self.executor.poll()
        return completion

    def run(self, plan: Plan) -> Completion:
        self.executor.launch(plan)
        return self.wait()


@pytest.fixture
def bench(llama: LoadedModel) -> Iterator[Bench]:
    made = Bench(Machine(llama, FakeGpu()))
    yield made
    made.executor.close()


def prefill(job: int, name: str, tokens: int, first: int = 0, last: int = 4) -> PrefillSlice:
    return PrefillSlice(job, (Span(name, 0, tokens),), first, last)


# ---- fences ----------------------------------------------------------------------------------------------------------


def test_a_launch_waits_for_ends_that_were_told_and_only_on_other_streams() -> None:
    gpu = FakeGpu()
    a, b = FakeStream("a", []), FakeStream("b", [])
    first, second, third = gpu.event(), gpu.event(), gpu.event()
    fences = Fences()
    assert fences.before(a) == ()
    fences.told(Lane.PREFILL, a, first)
    assert fences.before(a) == ()
    assert fences.before(b) == (first,)
    fences.told(Lane.DECODE, b, second)
    assert fences.before(a) == (second,)
    fences.told(Lane.PREFILL, b, third)  # the lane moved: it waited for `first` in its turn
    assert fences.before(a) == (third, second)
    assert fences.before(b) == ()


def test_a_slice_that_changes_lanes_waits_for_the_slice_before(bench: Bench) -> None:
    bench.sequences["a"] = sequence("a", [5, 6, 7], [1])
    first = bench.run(Plan(Partition(1, 3), prefill=prefill(1, "a", 3, 0, 2)))
    assert (first.failure, first.sampled) == (None, ())
    last = bench.run(Plan(Partition(3, 1), prefill=prefill(1, "a", 3, 2, 4)))
    assert last.sampled[0].token is not None
    assert bench.gpu.diary[-1] == "prefill-1 waits for e1 of prefill-3"

    bench.sequences["a"].tokens.append(9)
    bench.sequences["a"].computed = 3
    bench.run(Plan(TABLE.whole, decode=DecodeBatch(("a",))))
    assert bench.gpu.diary[-1] == "whole waits for e3 of prefill-1"


def test_lanes_do_not_wait_for_what_is_in_flight(llama: LoadedModel) -> None:
    gpu = FakeGpu()
    held = threading.Event()
    bench = Bench(Machine(llama, gpu))
    gpu.may_end = lambda event: event.stream is None or not event.stream.name.startswith("prefill") or held.is_set()
    bench.sequences |= {"a": sequence("a", [5, 6, 7], [1]), "b": sequence("b", [8, 9], [2], computed=1)}
    bench.executor.launch(Plan(Partition(1, 3), prefill=prefill(1, "a", 3), decode=DecodeBatch(("b",))))
    step = bench.wait()
    assert step.decode is not None
    bench.sequences["b"].tokens.append(4)
    bench.sequences["b"].computed = 2
    assert bench.run(Plan(Partition(1, 3), decode=DecodeBatch(("b",)))).decode is not None
    assert not [line for line in gpu.diary if "prefill-3" in line]
    held.set()
    assert bench.wait().prefill is not None
    bench.executor.close()


# ---- completions -----------------------------------------------------------------------------------------------------


def test_the_time_of_a_launch_is_the_devices(bench: Bench) -> None:
    bench.gpu.launch_ms = 7.0
    bench.sequences["a"] = sequence("a", [5, 6, 7], [1])
    done = bench.run(Plan(TABLE.whole, prefill=prefill(1, "a", 3)))
    assert done.ended_s - done.started_s == pytest.approx(0.007)
    assert done.units == 4


def test_activations_live_until_the_last_slice_or_until_forgotten(bench: Bench) -> None:
    bench.sequences["a"] = sequence("a", [5, 6, 7], [1])
    passes = bench.executor._passes
    bench.run(Plan(Partition(1, 3), prefill=prefill(1, "a", 3, 0, 2)))
    assert list(passes) == [1]
    bench.run(Plan(Partition(1, 3), prefill=prefill(1, "a", 3, 2, 4)))
    assert not passes
    bench.run(Plan(Partition(1, 3), prefill=prefill(2, "a", 3, 0, 2)))
    bench.executor.forget(2)
    assert not passes


class Poisoned(SlicedModel):
    """Fails as no one foresaw when it meets a certain token."""

    @override
    def embed(self, batch: Batch) -> torch.Tensor:
        if 7 in batch.tokens.tolist():
            raise IndexError("not foreseen")
        return super().embed(batch)


def test_whatever_a_launch_dies_of_its_lane_lives_on(llama: LoadedModel) -> None:
    bench = Bench(Machine(llama, FakeGpu(), model=Poisoned(llama.module)))
    bench.sequences |= {"bad": sequence("bad", [7], [1]), "good": sequence("good", [8], [2])}
    assert bench.run(Plan(TABLE.whole, prefill=prefill(1, "bad", 1))).failure == "IndexError: not foreseen"
    assert bench.run(Plan(TABLE.whole, prefill=prefill(2, "good", 1))).failure is None
    bench.executor.close()


def test_a_lost_gpu_ends_the_engine(llama: LoadedModel) -> None:
    gpu = FakeGpu(lost=True)
    bench = Bench(Machine(llama, gpu))
    bench.sequences["a"] = sequence("a", [5], [1])
    bench.executor.launch(Plan(TABLE.whole, prefill=prefill(1, "a", 1)))
    with pytest.raises(EngineStuck, match="on fire"):
        bench.wait()
    bench.executor.close()


def test_a_batch_larger_than_every_bucket_still_runs(llama: LoadedModel) -> None:
    bench = Bench(Machine(llama, FakeGpu(), most_rows=2))
    names = ("a", "b", "c")
    bench.sequences |= {name: sequence(name, [5 + at, 6], [at], computed=1) for at, name in enumerate(names)}
    done = bench.run(Plan(TABLE.whole, decode=DecodeBatch(names)))
    assert [sampled.id for sampled in done.sampled] == list(names)
    assert all(sampled.token is not None for sampled in done.sampled)
    bench.executor.close()


# ---- the right tokens ------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64, 150, 256, 700)
NEW_TOKENS = 8
TIE = 1e-4


def estimates(table: PartitionTable) -> Estimates:
    """Of a machine on which a slice has one layer or two, so that there is much to hand over."""
    units = {1, 2, 3, 4}
    step = {n: PassTimes((1, 64), (0.02 / n**0.5, 0.03 / n**0.5)) for n in units}
    prompt = {n: PassTimes((1, 512), (0.03 / n, 0.4 / n)) for n in units}
    return Estimates({Phase.DECODE: step, Phase.PREFILL: prompt})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["MixedBatch", "ChunkedPrefill", "StaticLanes", "Lanes", "Auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, mode: str, tmp_path: Path) -> None:
    """Greedy, whatever the policy, while the border jumps; half of the requests are greedy by way of a bias."""
    loaded = load_for_gpu(family, tmp_path / family)
    chance = random.Random(7)
    stops = tuple((token, -1e9) for token in loaded.facts.stop_token_ids)
    requests = [
        Request(
            f"r{number:02}",
            tuple(chance.randrange(3, loaded.facts.vocab_size) for _ in range(length)),
            NEW_TOKENS,
            Sampling(seed=0, temperature=0.0, logit_bias=stops if number % 2 else ()),
            arrival_s=float(number),
        )
        for number, length in enumerate(LENGTHS)
    ]
    rig = Rig(
        Machine(loaded, FakeGpu()).executor,
        table=TABLE,
        layers=4,
        blocks=BLOCKS,
        block_tokens=loaded.facts.kv_layout.block_tokens,
        estimates=estimates(TABLE),
        schedulers=live_policies(TABLE),
        policy=mode,
        objective=Objective(Slo(ttft_s=2.0, tpot_s=0.2, ttft_per_1k_input_tokens_s=2.0)),
    )
    bounds = itertools.cycle([(0.7, 1.0), (0.0, 0.3), (0.4, 0.6)])
    coming = list(reversed(requests))

    def jump() -> None:
        """And every few launches a request comes, so that it meets others at work."""
        low, high = next(bounds)
        rig.ledger.objective = replace(rig.ledger.objective, min_decode_share=low, max_decode_share=high)
        if coming and rig.ledger.steps >= 2 * (len(requests) - len(coming)):
            rig.submit(coming.pop())

    rig.desk.at_turn = jump
    rig.desk.longest_wait_s = 0.01
    rig.run(lambda: not coming and not rig.desk.inbox and rig.ledger.empty)
    rig.close()
    assert rig.usage.border_moves >= 5 or mode != "Lanes"
    assert rig.errors() == {}
    assert rig.ledger.pool.free == BLOCKS
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32)
    for request in requests:
        got = rig.answers()[request.id]
        assert got
        with torch.no_grad():
            logits = reference(torch.tensor([[*request.prompt, *got]])).logits[0, len(request.prompt) - 1 : -1]
        for token, row in zip(got, logits, strict=True):
            if request.sampling.logit_bias:
                row[list(loaded.facts.stop_token_ids)] = -1e9
            assert float(row.max() - row[token]) <= TIE
