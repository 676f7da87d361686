"""The right tokens: greedy, against transformers, under every policy, with the border jumping and slices on the move.

The engine's tokens are judged by a float32 forward of transformers over prompt and answer: each must be the likeliest,
or as near to it as transformers' own tokens are in the same dtype (several times as near in float32, where there is
hardly any noise).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tools.gpu.host import HostGpu, HostLanes
from tools.gpu.models import FAMILIES, layout_of, small
from tools.gpu.report import Finding, Report

from tidelane.engine.bench.rig import Rig
from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.execution.cuda import CudaExecutor
from tidelane.engine.execution.graphs import DecodeSteps, StepBuffers, buckets
from tidelane.engine.gpu import GpuParts, cuda_executor, open_gpu
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.partition import PartitionTable, sm_table
from tidelane.engine.model.attention_cuda import NAME, PLAIN, register
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.fusing import fuse
from tidelane.engine.request import Request, Sampling
from tidelane.engine.scheduling.plan import Objective
from tidelane.engine.scheduling.policies import live_policies
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64, 99, 101, 150, 256, 700, 1500, 2500)
LENGTHS_ON_A_CPU = LENGTHS[:11]
NEW_TOKENS = 12
MOST_TOKENS = 4096
MOST_ROWS = 16
BLOCKS = 700
# Launches between two requests; how often the border must have moved for the check to mean anything.
TURNS_APART = 2
LEAST_MOVES = 5
POLICIES = ("MixedBatch", "ChunkedPrefill", "StaticLanes", "Lanes", "Auto")
# How far below the likeliest logit a token may be, as a part of the row's spread; the larger of this and...
SLACK = {torch.float32: 1e-3, torch.bfloat16: 0.02}
# ...this many times transformers' own worst.
TIMES_THEIRS = 3.0


@dataclass(frozen=True)
class Machine:
    """A GPU, or the CPU in a dry run."""

    table: PartitionTable
    layers: int
    block_tokens: int
    make_executor: Callable[[Mapping[str, Sequence], Callable[[], None]], CudaExecutor]
    drop_graphs: Callable[[], None]
    close: Callable[[], None]


def open_machine(module: Any, *, dry_run: bool) -> Machine:
    fuse(module)
    layout, vocab_size = layout_of(module), module.config.vocab_size
    if not dry_run:
        parts = open_gpu(
            module,
            layout,
            device=module.device,
            vocab_size=vocab_size,
            most_tokens=MOST_TOKENS,
            kv_pool_bytes=(BLOCKS + 1) * layout.block_bytes,
            most_rows=MOST_ROWS,
        )
        return gpu_machine(parts)
    model = SlicedModel(module)
    pool = DevicePool.allocate(layout, BLOCKS + 1, module.dtype, torch.device("cpu"))
    steps = DecodeSteps(model, pool, PLAIN, StepBuffers(pool, MOST_ROWS, MOST_TOKENS, vocab_size), buckets(MOST_ROWS))
    table = sm_table(132, (9, 0))

    def executor(sequences: Mapping[str, Sequence], notify: Callable[[], None]) -> CudaExecutor:
        return CudaExecutor(
            gpu=HostGpu(),
            model=model,
            pool=pool,
            kernels=PLAIN,
            lanes=HostLanes(table),
            steps=steps,
            sequences=sequences,
            notify=notify,
        )

    return Machine(table, model.layers, layout.block_tokens, executor, steps.drop_graphs, lambda: None)


def gpu_machine(parts: GpuParts) -> Machine:
    return Machine(
        parts.lanes.table,
        parts.model.layers,
        parts.pool.layout.block_tokens,
        partial(cuda_executor, parts),
        parts.steps.drop_graphs,
        parts.close,
    )


def check_tokens(report: Report, family: str, dtype: torch.dtype) -> None:
    name = f"{family} {str(dtype).removeprefix('torch.')}"
    device = torch.device("cpu" if report.dry_run else "cuda:0")
    register()
    module: Any = small(family, seed=20)
    module = module.to(device, dtype).eval()
    reference = deepcopy(module).float()
    theirs = deepcopy(module)
    module.set_attn_implementation(NAME)
    opened: list[Machine] = []

    def opening(_: float) -> Finding:
        opened.append(open_machine(module, dry_run=report.dry_run))
        return Finding("opened", ok=True)

    report.check(f"tokens, {name}: open", 60, opening)
    if not opened:
        return  # that is this family's finding; the others are still checked
    (machine,) = opened
    noise = worst_of_theirs(theirs, reference)
    for policy in POLICIES:
        report.check(f"tokens, {name}, {policy}", 30, partial(compare, machine, policy, reference, dtype, noise))
    if not report.dry_run:
        machine.drop_graphs()
        report.check(
            f"tokens, {name}, Lanes, no graphs", 30, partial(compare, machine, "Lanes", reference, dtype, noise)
        )
    machine.close()


def requests(vocab_size: int, device: torch.device) -> list[Request]:
    """A third of them are greedy by way of a bias that changes nothing, which is not the graph's own argmax."""
    chance = random.Random(7)
    return [
        Request(
            f"r{number:02}",
            tuple(chance.randrange(3, vocab_size) for _ in range(length)),
            NEW_TOKENS,
            Sampling(seed=0, temperature=0.0, logit_bias=() if number % 3 else ((0, 0.0),)),
            arrival_s=float(number),
        )
        for number, length in enumerate(LENGTHS if device.type == "cuda" else LENGTHS_ON_A_CPU)
    ]


def compare(machine: Machine, policy: str, reference: Any, dtype: torch.dtype, noise: float, until_s: float) -> Finding:
    rig = Rig(
        machine.make_executor,
        table=machine.table,
        layers=machine.layers,
        blocks=BLOCKS,
        block_tokens=machine.block_tokens,
        estimates=thin_slices(machine.table),
        schedulers=live_policies(machine.table),
        policy=policy,
        objective=Objective(Slo(ttft_s=2.0, tpot_s=0.2, ttft_per_1k_input_tokens_s=2.0)),
    )
    bounds = itertools.cycle([(0.7, 1.0), (0.0, 0.2), (0.3, 0.6), (0.0, 0.1)])
    asked = requests(reference.config.vocab_size, reference.device)
    coming = list(reversed(asked))

    def jump() -> None:
        """The border's bounds move at every turn; every few turns a request comes, so that it meets others at work."""
        low, high = next(bounds)
        rig.ledger.objective = replace(rig.ledger.objective, min_decode_share=low, max_decode_share=high)
        if coming and rig.ledger.steps >= TURNS_APART * (len(asked) - len(coming)):
            rig.submit(coming.pop())

    rig.desk.at_turn = jump
    rig.desk.longest_wait_s = 0.01
    rig.run(lambda: time.monotonic() > until_s or (not coming and not rig.desk.inbox and rig.ledger.empty))
    rig.close()
    answers, errors = rig.answers(), rig.errors()
    short = [request.id for request in asked if len(answers.get(request.id, ())) != NEW_TOKENS]
    worst, exact, tokens = 0.0, 0, 0
    for request in asked:
        misses = shortfalls(reference, request.prompt, answers.get(request.id, []))
        worst, exact, tokens = max([worst, *misses]), exact + misses.count(0.0), tokens + len(misses)
    allowed = max(SLACK[dtype], TIMES_THEIRS * noise)
    moves = rig.usage.border_moves
    summary = (
        f"{exact}/{tokens} the likeliest, worst short by {worst:.1e} (allowed {allowed:.1e}), {moves} border moves"
    )
    if errors or short:
        summary = f"errors {errors or 'none'}, unfinished {short or 'none'}; {summary}"
    good = not errors and not short and worst <= allowed and (moves >= LEAST_MOVES or policy != "Lanes")
    return Finding(summary[:300], good, {"worst": worst, "theirs": noise, "moves": moves})


def shortfalls(reference: Any, prompt: tuple[int, ...], answer: list[int]) -> list[float]:
    """How far below the likeliest each token is, as a part of the spread of its row of logits."""
    if not answer:
        return []
    with torch.no_grad():
        tokens = torch.tensor([[*prompt, *answer]], device=reference.device)
        rows = reference(tokens).logits[0, len(prompt) - 1 : -1].float()
    chosen = rows.gather(1, tokens[0, len(prompt) :].unsqueeze(1)).squeeze(1)
    return ((rows.max(dim=1).values - chosen) / (rows.max(dim=1).values - rows.mean(dim=1))).tolist()  # type: ignore[no-any-return]


def worst_of_theirs(theirs: Any, reference: Any) -> float:
    """The same measure for transformers' own likeliest tokens in the engine's dtype, over whole prompts."""
    worst = 0.0
    for request in requests(reference.config.vocab_size, reference.device):
        tokens = torch.tensor([request.prompt], device=reference.device)
        with torch.no_grad():
            rows, chosen = reference(tokens).logits[0].float(), theirs(tokens).logits[0].argmax(dim=1, keepdim=True)
        short = rows.max(dim=1).values - rows.gather(1, chosen).squeeze(1)
        worst = max(worst, float((short / (rows.max(dim=1).values - rows.mean(dim=1))).max()))
    return worst


def thin_slices(table: PartitionTable) -> Estimates:
    """Of a machine on which a slice has a layer or two, so that there is much to hand over."""
    units = {n for row in (*table.splits, table.whole) for n in (row.decode_units, row.prefill_units)}
    whole = table.units
    step = {n: PassTimes((1, 64), (0.02, 0.03)) for n in units}
    prompt = {n: PassTimes((1, 512), (0.05 * whole / n, 0.1 * whole / n)) for n in units}
    return Estimates({Phase.DECODE: step, Phase.PREFILL: prompt})


def main() -> None:
    report = Report.from_arguments()
    if report.dry_run:
        check_tokens(report, "llama", torch.float32)
        return
    for family in FAMILIES:
        check_tokens(report, family, torch.bfloat16)
    check_tokens(report, "llama", torch.float32)


if __name__ == "__main__":
    main()
