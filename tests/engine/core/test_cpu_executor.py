from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typing_extensions import override

from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.channel import Tokens
from tidelane.engine.model.batch import RaggedBatch
from tidelane.engine.model.forward import Batch, SlicedModel
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.request import FinishReason, Request, Sampling
from tidelane.rpc.wire import ExecutionMode

from .models import save

POISON = 7


class Poisoned(SlicedModel):
    """Fails as no one foresaw when it meets a certain token."""

    @override
    def embed(self, batch: Batch) -> torch.Tensor:
        assert isinstance(batch, RaggedBatch)
        if len(batch.segments) == 1 and POISON in batch.tokens[:1].tolist() and len(batch.tokens) == 3:
            raise IndexError("not foreseen")
        return super().embed(batch)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load(save("llama", tmp_path / "llama"), "float32", None, torch.device("cpu"))


def request(name: str, prompt: tuple[int, ...]) -> Request:
    return Request(name, prompt, 4, Sampling(seed=0, temperature=0.0), arrival_s=0.0)


def test_whatever_a_launch_dies_of_its_lane_lives_on(loaded: LoadedModel) -> None:
    with InProcessEngine(
        loaded, cores=(0,), mode=ExecutionMode.MIXED_BATCH, kv_blocks=64, model=Poisoned(loaded.module)
    ) as engine:
        engine.submit(request("bad", (POISON, 1, 2)))
        engine.run()
        engine.submit(request("good", (5, 6)))
        engine.run()
        bad, good = engine.endings()["bad"], engine.endings()["good"]
        assert isinstance(bad, Tokens)
        assert (bad.finish, bad.error) == (FinishReason.ERROR, "IndexError: not foreseen")
        assert isinstance(good, Tokens)
        assert good.finish is FinishReason.LENGTH
        assert engine.ledger.pool.free == 64
