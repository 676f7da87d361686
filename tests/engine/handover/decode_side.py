"""An engine of two processes, to be killed by a test: decode_side.py FOLDER idle|stopped|computing."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.model.loading import load
from tidelane.engine.request import Request, Sampling
from tidelane.rpc.wire import ExecutionMode


def main(folder: str, moment: str) -> None:
    loaded = load(Path(folder), "float32", None, torch.device("cpu"))
    with InProcessEngine(loaded, cores=(0, 1), mode=ExecutionMode.DISAGGREGATED, kv_blocks=800) as engine:
        assert engine.prefill_side is not None
        assert engine.prefill_side.pid is not None
        if moment == "stopped":
            os.kill(engine.prefill_side.pid, signal.SIGSTOP)
        if moment != "idle":
            for number in range(6):
                prompt = tuple(3 + at % 500 for at in range(2000))
                engine.submit(Request(f"r{number}", prompt, 50, Sampling(seed=0, temperature=0.0), arrival_s=0.0))
            engine.run(until=lambda: engine.ledger.flight.prefill is not None)
        print("there", flush=True)
        if moment == "computing":
            engine.run()
        signal.pause()


main(*sys.argv[1:])
