"""What it costs to hand the KV of a prompt over, of what the prompt costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from tidelane.engine.bench.engine_cases import request
from tidelane.engine.bench.ratio import Measured, Ratio, interleaved
from tidelane.engine.handover.carrier import SharedMemoryCarrier
from tidelane.engine.handover.prefill_process import HandingModel
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.shared import SharedMemory
from tidelane.engine.lanes.cores import CoreLane
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import LoadedModel

PROMPT_TOKENS = 1024
# A pass takes a second or so, and what is asked is a few per cent of it.
FEWEST_ROUNDS = 9


def handover(loaded: LoadedModel, cores: Sequence[int], rounds: int) -> list[Ratio]:
    """A pass over one prompt, layer by layer into shared memory, against the same pass at once and for itself."""
    layout, dtype = loaded.facts.kv_layout, loaded.facts.dtype
    blocks = layout.blocks_for(PROMPT_TOKENS)
    pool = DevicePool.allocate(layout, blocks, dtype, torch.device("cpu"))
    memory = SharedMemory(blocks * layout.block_bytes)
    target = DevicePool.within(memory.mapped(), layout, blocks, dtype)
    memory.close()
    plain = SlicedModel(loaded.module)
    handing = HandingModel(loaded, plain, SharedMemoryCarrier(pool, target))
    prompt = Rows(request("prompt", PROMPT_TOKENS, 1).prompt, 0, list(range(blocks)))
    batch = RaggedBatch.build([prompt], pool)
    lane = CoreLane("prefill", cores)
    try:
        _seconds(lane, handing, batch)  # touches all memory, for both
        over, under = interleaved(
            lambda: _seconds(lane, handing, batch), lambda: _seconds(lane, plain, batch), max(rounds, FEWEST_ROUNDS)
        )
    finally:
        lane.close()
    megabytes = blocks * layout.block_bytes / 1e6
    name = f"prefill of {PROMPT_TOKENS:,} tokens with its KV handed over, over without"
    sides = (Measured("handed over", over, "s"), Measured("kept", under, "s"))
    return [Ratio(name, *sides, at_most=1.05, price=f"{megabytes:.0f} MB of KV in each")]


def _seconds(lane: CoreLane, model: SlicedModel, batch: RaggedBatch) -> float:
    took_s: list[float] = []
    done = threading.Event()

    def work() -> None:
        begun_s = time.monotonic()
        model.run(model.embed(batch), batch, 0, model.layers)
        took_s.append(time.monotonic() - begun_s)
        done.set()

    lane.submit(work)
    done.wait()
    return took_s[0]
