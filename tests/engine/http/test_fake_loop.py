"""The fake keeps the contract of the real loop, so what the front's tests show of the front holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.http.fake_loop import FakeLoop
from engine.http.tiny_model import facts_of
from engine.loop_contract import *  # noqa: F403
from engine.loop_contract import LoopUnderTest
from tidelane.engine.channel import front_end

QUEUE_LIMIT = 8


@pytest.fixture
def loop(model_folder: Path, tmp_path: Path) -> Iterator[LoopUnderTest]:
    channel = str(tmp_path / "loop")
    # Slow enough for an abort to come before the last of 400 tokens, also on a busy machine.
    fake = FakeLoop(channel, facts_of(model_folder, "tiny"), QUEUE_LIMIT, pace_s=0.004)
    endpoint = front_end(channel)
    fake.start()
    try:
        yield LoopUnderTest(endpoint, QUEUE_LIMIT)
    finally:
        fake.stop()
        endpoint.close()
