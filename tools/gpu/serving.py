"""A model of Llama-3.1-8B's shape: steps against the memory's floor, prefill against the arithmetic's, gaps between
tokens beside a long prompt, a profile, and goodput under a short load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import pairwise
from statistics import median
from threading import Event
from typing import Any

import torch
from tools.gpu.models import layout_of, llama_8b
from tools.gpu.report import Finding, Report

from tidelane.engine.bench.rig import Rig
from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import decode_work, prefill_work
from tidelane.engine.estimation.profile import ProfileKey, write_profile
from tidelane.engine.gpu import GpuParts, calibrate_gpu, cuda_executor, open_gpu
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.model.attention_cuda import NAME, register
from tidelane.engine.model.fusing import fuse
from tidelane.engine.profiling.campaign import measure
from tidelane.engine.profiling.probes import Probe, Room, probes
from tidelane.engine.profiling.stand import Stand
from tidelane.engine.profiling.verdict import judge
from tidelane.engine.request import Request, Sampling
from tidelane.engine.scheduling.plan import Objective, Scheduler
from tidelane.engine.scheduling.policies import live_policies, policy
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo, percentile

MOST_TOKENS = 40_960
SLO = Slo(ttft_s=0.2, tpot_s=0.05, ttft_per_1k_input_tokens_s=0.1)
STEP_BATCHES = (1, 16, 64, 256)
STEP_CONTEXT = 1024
PASS_TOKENS = (512, 2048, 8192)
# What a step or a pass may take, in multiples of what memory or arithmetic allow: first guesses, never yet measured.
MOST_TIMES_FLOOR, MOST_TIMES_ARITHMETIC = 1.6, 1.8
# The long prompt, and those that decode beside it.
LONG_PROMPT = 32_768
DECODING, THEIR_PROMPT, THEIR_TOKENS = 16, 512, 2000
PROFILE_S = 60.0
# The load: input and output tokens as a public chat trace has them, about, and requests a second.
INPUT, OUTPUT, MOST_INPUT, MOST_OUTPUT = (6.6, 0.7), (5.0, 0.5), 6000, 400
RATES = (12.0, 24.0)
LOAD_S = 9.0
DRAIN_S = 8.0


class Serving:
    """What the checks share: parts, and estimates that get better as it goes on."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.device = torch.device("cuda:0")
        self.begun_s = time.monotonic()
        register()
        module: Any = llama_8b(self.device, NAME, MOST_TOKENS)
        fuse(module)
        self.weight_bytes: int = sum(p.nbytes for p in module.parameters() if p.dim() > 1)
        self.weight_bytes -= module.get_input_embeddings().weight.nbytes
        self.layout = layout_of(module)
        self.parts: GpuParts = open_gpu(
            module,
            self.layout,
            device=self.device,
            vocab_size=module.config.vocab_size,
            most_tokens=MOST_TOKENS,
        )
        self.estimates: Estimates | None = None
        self._floors: tuple[float, float] | None = None

    @property
    def room(self) -> int:
        """Tokens that the pool holds."""
        return self.parts.blocks * self.layout.block_tokens

    def floors(self) -> tuple[float, float]:
        """Bytes a second that memory gives to weights, and flop a second of a large product: the device, whole."""
        if self._floors is None:
            tall = [torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(8)]
            thin = torch.randn(16, 8192, device=self.device, dtype=torch.bfloat16)
            read_s = timed(lambda: [thin @ each for each in tall])
            product_s = timed(lambda: tall[0] @ tall[1])
            self._floors = (sum(each.nbytes for each in tall) / read_s, 2 * 8192**3 / product_s)
        return self._floors

    @contextmanager
    def stand(self) -> Iterator[Stand]:
        sequences: dict[str, Sequence] = {}
        ended = Event()

        def wait() -> None:
            if not ended.wait(timeout=60):
                raise TimeoutError("a launch did not end within 60 s")
            ended.clear()

        executor = cuda_executor(self.parts, sequences, ended.set)
        yield Stand(
            executor,
            sequences,
            wait,
            layers=self.parts.model.layers,
            block_tokens=self.layout.block_tokens,
            vocab_size=self.parts.vocab_size,
        )
        executor.close()

    @contextmanager
    def rig(self, schedulers: dict[str, Scheduler], name: str, slo: Slo) -> Iterator[Rig]:
        assert self.estimates is not None, "not calibrated"
        made = Rig(
            partial(cuda_executor, self.parts),
            table=self.parts.lanes.table,
            layers=self.parts.model.layers,
            blocks=self.parts.blocks,
            block_tokens=self.layout.block_tokens,
            estimates=self.estimates,
            schedulers=schedulers,
            policy=name,
            objective=Objective(slo),
        )
        yield made
        made.close()


# ---- speeds ----------------------------------------------------------------------------------------------------------


def calibration(serving: Serving, _until_s: float) -> Finding:
    serving.estimates = calibrate_gpu(serving.parts, MOST_TOKENS)
    whole = serving.parts.lanes.table.units
    step_s = serving.estimates.seconds(Phase.DECODE, whole, decode_work(16, 16 * 1024))
    pass_s = serving.estimates.seconds(Phase.PREFILL, whole, prefill_work(((0, 2048),)))
    return Finding(f"step of 16 at 1,024: {step_s * 1000:.1f} ms, prompt of 2,048: {pass_s * 1000:.0f} ms, predicted")


def steps(serving: Serving, until_s: float) -> Finding:
    """Decode against the time that memory takes for the weights and the contexts."""
    bandwidth, _ = serving.floors()
    table = serving.parts.lanes.table
    times: dict[str, float] = {}
    ratios: dict[int, float] = {}
    with serving.stand() as stand:
        for batch in (n for n in STEP_BATCHES if n * (STEP_CONTEXT + 16) <= serving.room):
            step_s = settled(stand, Probe(table.whole, contexts=(STEP_CONTEXT,) * batch), until_s)
            floor_s = (serving.weight_bytes + batch * STEP_CONTEXT * serving.layout.token_bytes) / bandwidth
            ratios[batch] = step_s / floor_s
            times[f"whole, {batch}"] = step_s
        for row in table.splits:
            times[f"{row.decode_units} SMs, 16"] = settled(stand, Probe(row, contexts=(STEP_CONTEXT,) * 16), until_s)
    said = ", ".join(f"{n}: {times[f'whole, {n}'] * 1000:.1f} ms = {ratio:.2f} floors" for n, ratio in ratios.items())
    data = {"seconds": times, "floors": ratios, "bandwidth": bandwidth}
    return Finding(f"at 1,024 tokens {said}", max(ratios.values()) <= MOST_TIMES_FLOOR, data)


def passes(serving: Serving, until_s: float) -> Finding:
    """Prefill against the time of its arithmetic at the rate of a large matrix product."""
    _, flops = serving.floors()
    table, layout = serving.parts.lanes.table, serving.layout
    times: dict[str, float] = {}
    ratios: dict[int, float] = {}
    with serving.stand() as stand:
        for tokens in PASS_TOKENS:
            pass_s = settled(stand, Probe(table.whole, spans=((0, tokens),)), until_s, times=3)
            pair_flops = 2 * serving.parts.model.query_heads * (layout.key_dim + layout.value_dim) * layout.layers
            work = 2 * serving.parts.model.linear_weights * tokens + pair_flops * tokens * tokens / 2
            ratios[tokens] = pass_s / (work / flops)
            times[f"whole, {tokens}"] = pass_s
        for row in table.splits:
            times[f"{row.prefill_units} SMs, 2048"] = settled(stand, Probe(row, spans=((0, 2048),)), until_s, times=2)
    said = ", ".join(f"{n}: {times[f'whole, {n}'] * 1000:.0f} ms = {ratio:.2f}" for n, ratio in ratios.items())
    within = ratios[max(ratios)] <= MOST_TIMES_ARITHMETIC
    return Finding(f"{said} times the arithmetic", within, {"seconds": times, "ratios": ratios, "flops": flops})


def settled(stand: Stand, probe: Probe, until_s: float, times: int = 5) -> float:
    stand.seconds(probe)
    seconds = [stand.seconds(probe)]
    while len(seconds) < times and time.monotonic() < until_s:
        seconds.append(stand.seconds(probe))
    return median(seconds)


# ---- gaps beside a long prompt ---------------------------------------------------------------------------------------


def gaps(serving: Serving, mode: str, until_s: float) -> Finding:
    """Gaps between the tokens of requests that decode while a long prompt is prefilled."""
    table = serving.parts.lanes.table
    vocab = serving.parts.vocab_size
    with serving.rig(dict(live_policies(table)), mode, SLO) as rig:
        for number in range(DECODING):
            rig.submit(request(f"d{number}", prompt(number, THEIR_PROMPT, vocab), THEIR_TOKENS))
        rig.run(lambda: time.monotonic() > until_s or all_have(rig, DECODING, 20))
        asked_s = time.monotonic()
        rig.submit(request("long", prompt(99, min(LONG_PROMPT, serving.room // 2), vocab), 1, asked_s))
        rig.run(lambda: time.monotonic() > until_s or bool(rig.answers().get("long")) or bool(rig.errors()))
        ended_s = time.monotonic()
        if rig.errors() or not rig.answers().get("long"):
            return Finding(f"not finished: {rig.errors() or 'time is up'}"[:200], ok=False)
        seen = [
            later - earlier
            for name, times in rig.token_times().items()
            if name != "long"
            for earlier, later in pairwise(times)
            if asked_s <= later and earlier <= ended_s
        ]
        use = rig.usage.realised()
    p50, p99 = (percentile(seen, at) * 1000 for at in (50, 99))
    said = f"TBT p50 {p50:.1f}, p99 {p99:.1f}, max {max(seen) * 1000:.0f} ms; the prompt took {ended_s - asked_s:.2f} s"
    data = {"p50_ms": p50, "p99_ms": p99, "max_ms": max(seen) * 1000, "ttft_s": ended_s - asked_s}
    return Finding(said, None, data | {"shares": dict(use.shares), "decode_share": use.decode_unit_share})


def all_have(rig: Rig, requests: int, tokens: int) -> bool:
    answers = rig.answers()
    return len(answers) == requests and all(len(answer) >= tokens for answer in answers.values())


# ---- a profile -------------------------------------------------------------------------------------------------------


def profile(serving: Serving, until_s: float) -> Finding:
    """As `tidelane profile` does. What follows predicts from it."""
    assert serving.estimates is not None, "not calibrated"
    table = serving.parts.lanes.table
    room = Room(MOST_TOKENS, serving.parts.blocks, serving.layout.block_tokens)
    with serving.stand() as stand:
        found = measure(
            stand,
            probes(table, room),
            serving.estimates,
            budget_s=min(PROFILE_S, until_s - time.monotonic()),
            seed=1,
            clock=time.monotonic,
            tell=lambda *_: None,
        )
    key = ProfileKey(
        weights_digest="random-llama-3.1-8b",
        device=torch.cuda.get_device_name(serving.device),
        units=table.units,
        dtype="bfloat16",
        layers=serving.parts.model.layers,
    )
    verdict = judge(key, datetime.now().astimezone().date(), found, serving.estimates)
    path = serving.report.out / "gpu-profile.json"
    write_profile(path, verdict.profile)
    serving.estimates = verdict.profile.estimates()
    overall = {str(each.phase): each.error for each in verdict.findings if each.units is None}
    said = ", ".join(f"{name} {e.median:.1%} (p90 {e.p90:.1%})" for name, e in overall.items())
    good = all(error.median <= 0.10 and error.p90 <= 0.20 for error in overall.values())
    contention = verdict.profile.contention
    data = {"contention": [contention.decode_slowdown, contention.prefill_slowdown, contention.guard]}
    return Finding(f"errors held out: {said}; guard {contention.guard:.2f}; in {path}", good, data)


# ---- goodput ---------------------------------------------------------------------------------------------------------


def goodput(serving: Serving, name: str, scheduler: Scheduler, rate: float, until_s: float) -> Finding:
    """Poisson arrivals for some seconds, then as long to end; whoever has not ended is late."""
    chance = random.Random(int(rate))
    vocab = serving.parts.vocab_size
    arrivals: list[tuple[float, Request]] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < LOAD_S:
        tokens = min(MOST_INPUT, max(16, int(chance.lognormvariate(*INPUT))))
        new = min(MOST_OUTPUT, max(2, int(chance.lognormvariate(*OUTPUT))))
        arrivals.append((at_s, request(f"q{len(arrivals)}", prompt(len(arrivals), tokens, vocab), new)))
    with serving.rig({name: scheduler}, name, SLO) as rig:
        begun_s = time.monotonic()
        due = list(reversed(arrivals))

        def submit() -> None:
            now_s = time.monotonic() - begun_s
            while due and due[-1][0] <= now_s:
                arrived_s, asked = due.pop()
                rig.submit(arriving(asked, begun_s + arrived_s))
            rig.desk.longest_wait_s = min(0.1, due[-1][0] - now_s) if due else 0.1

        rig.desk.at_turn = submit
        end_s = min(until_s, begun_s + LOAD_S + DRAIN_S)
        rig.run(lambda: time.monotonic() > end_s or (not due and rig.ledger.empty))
        seconds = min(time.monotonic() - begun_s, LOAD_S)
        good = sum(timeline is not None and timeline.meets(slo) for timeline, slo in rig.ended)
        timelines = [timeline for timeline, _ in rig.ended if timeline is not None]
        errors = rig.errors()
        steps_made = rig.ledger.steps
    sent = len(arrivals) - len(due)
    ttft = [timeline.ttft_s * 1000 for timeline in timelines] or [float("nan")]
    tpot = [timeline.tpot_s * 1000 for timeline in timelines] or [float("nan")]
    said = (
        f"{good}/{sent} within SLO = {good / seconds:.1f}/s; TTFT p50 {percentile(ttft, 50):.0f} "
        f"p99 {percentile(ttft, 99):.0f}, TPOT p50 {percentile(tpot, 50):.1f} p99 {percentile(tpot, 99):.1f} ms"
    )
    data = {"sent": sent, "good": good, "ended": len(rig.ended), "ttft_ms": ttft, "tpot_ms": tpot, "steps": steps_made}
    return Finding(said, False if errors else None, data | {"errors": errors})


# ---- small things ----------------------------------------------------------------------------------------------------


def prompt(seed: int, tokens: int, vocab_size: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.choices(range(vocab_size), k=tokens))


def request(name: str, tokens: tuple[int, ...], new: int, arrival_s: float | None = None) -> Request:
    greedy = Sampling(seed=0, temperature=0.0)
    return Request(name, tokens, new, greedy, time.monotonic() if arrival_s is None else arrival_s)


def arriving(asked: Request, arrival_s: float) -> Request:
    return Request(asked.id, asked.prompt, asked.max_new_tokens, asked.sampling, arrival_s)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one `work` on the current stream: the median, after one to warm up."""
    seconds = []
    work()
    for _ in range(5):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        work()
        ended.record()
        seconds.append((begun, ended))
    torch.cuda.synchronize()
    return median(float(begun.elapsed_time(ended)) / 1000 for begun, ended in seconds)


def main() -> None:
    report = Report.from_arguments()
    made: list[Serving] = []

    def opening(_: float) -> Finding:
        serving = Serving(report)
        made.append(serving)
        used_bytes = torch.cuda.memory_allocated()
        seconds = time.monotonic() - serving.begun_s
        graphs = "graphs" if serving.parts.kernels.captures else "NO GRAPHS"
        said = f"in {seconds:.0f} s, with {graphs}; KV for {serving.room} tokens"
        return Finding(said, None, {"seconds": seconds, "memory_bytes": used_bytes})

    report.check("8B: opened", 90, opening)
    if not made:
        return
    serving = made[0]
    table = serving.parts.lanes.table
    report.check("8B: first estimates", 30, partial(calibration, serving))
    report.check("8B: decode step against memory", 15, partial(steps, serving))
    report.check("8B: prefill against arithmetic", 15, partial(passes, serving))
    for mode in ("MixedBatch", "ChunkedPrefill", "StaticLanes", "Lanes", "Auto"):
        report.check(f"8B: gaps beside a 32K prompt, {mode}", 15, partial(gaps, serving, mode))
    report.check("8B: profile", PROFILE_S + 5, partial(profile, serving))
    for rate in RATES:
        for name, scheduler in policies(table.splits):
            run = partial(goodput, serving, name, scheduler, rate)
            report.check(f"8B: goodput at {rate:.0f}/s, {name}", LOAD_S + DRAIN_S + 1, run)


def policies(splits: tuple[Partition, ...]) -> Iterator[tuple[str, Scheduler]]:
    yield "auto", policy("auto")
    yield "chunked, first come", policy("chunked", "own")
    yield "lanes", policy("lanes")
    yield "chunked, our order", policy("chunked")
    if splits:
        yield "static", policy("static", split=splits[len(splits) // 2])


if __name__ == "__main__":
    main()
