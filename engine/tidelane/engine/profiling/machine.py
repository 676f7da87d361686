"""A profile of a real model on this machine: the engine's own parts and executor, without loop and front."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from tidelane.engine.assembly import Parts, load_parts
from tidelane.engine.config import ComputeConfig
from tidelane.engine.execution.calibration import calibrate
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.execution.starting import kept_at, profile_key
from tidelane.engine.profiling.campaign import Measurements, measure
from tidelane.engine.profiling.probes import Room, probes
from tidelane.engine.profiling.stand import Stand
from tidelane.engine.profiling.verdict import Verdict, judge
from tidelane.engine.sequence import Sequence

# What the cache holds while passes are timed. Not what it is made of: pages of zeros that were never written to are all
# one page, which lies in the fastest cache.
FILLING = 0.01


@dataclass(frozen=True, slots=True)
class Profiled:
    """`kept_at` is where an engine looks for this profile."""

    verdict: Verdict
    found: Measurements
    kept_at: Path


def profile(config: ComputeConfig, *, budget_s: float, seed: int, tell: Callable[[str, int, int], None]) -> Profiled:
    """Load the model and measure it for at most `budget_s`. `tell` hears (what is done, seconds of it, of how many).

    Raises CannotServe if the model cannot run as asked, TooFewPoints if the time does not suffice.
    """
    tell("Loading the model", 0, 0)
    parts = load_parts(config)
    key = profile_key(parts.loaded.facts, parts.lanes)
    ended = threading.Event()
    sequences: dict[str, Sequence] = {}

    def wait() -> None:
        ended.wait()
        ended.clear()

    with closing(CpuExecutor(parts.model, parts.pool, parts.lanes, sequences, ended.set)) as executor:
        tell("Warming up", 0, 0)
        prior = calibrate(parts.model, parts.pool, parts.lanes)
        facts, block_tokens = parts.loaded.facts, parts.pool.layout.block_tokens
        chosen = probes(parts.lanes.table, Room(facts.max_context_tokens, parts.pool.blocks, block_tokens))
        _touch(parts, max(probe.blocks(block_tokens) for probe in chosen) * block_tokens)
        stand = Stand(
            executor,
            sequences,
            wait,
            layers=parts.model.layers,
            block_tokens=block_tokens,
            vocab_size=facts.vocab_size,
        )
        found = measure(
            stand,
            chosen,
            prior,
            budget_s=budget_s,
            seed=seed,
            clock=time.monotonic,
            tell=lambda gone, of: tell("Timing passes", gone, of),
        )
    verdict = judge(key, datetime.now().astimezone().date(), found, prior)
    return Profiled(verdict, found, kept_at(config.model_store, key))


def _touch(parts: Parts, slots: int) -> None:
    with torch.inference_mode():
        for tensor in (*parts.pool.keys, *parts.pool.values):
            tensor[:slots].fill_(FILLING)
