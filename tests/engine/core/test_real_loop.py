"""The real loop, on the real channel, passes the contract that the front was written against."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.loop_contract import *  # noqa: F403 - the contract's tests
from engine.loop_contract import LoopUnderTest
from tidelane.engine.assembly import assemble
from tidelane.engine.channel import front_end, loop_end
from tidelane.engine.config import ServeConfig
from tidelane.engine.control import ControlRoom
from tidelane.engine.slo import Slo
from tidelane.engine.wakeup import Wakeup
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import ExecutionMode, Objective

from .models import save

QUEUE_LIMIT = 40


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(
    params=[
        ExecutionMode.LANES,
        ExecutionMode.MIXED_BATCH,
        pytest.param(ExecutionMode.DISAGGREGATED, marks=pytest.mark.slow),  # starts two processes for each test
    ]
)
def loop(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[LoopUnderTest]:
    objective = Objective(Slo(ttft_s=2, tpot_s=0.2), request.param)
    config = ServeConfig(
        model=f"file://{tiny_model}",
        model_store=tmp_path,
        served_name="tiny",
        objective=objective,
        kv_pool_bytes=8 << 20,
        queue_limit=QUEUE_LIMIT,
    )
    wakeup = Wakeup()
    room = ControlRoom(objective, wakeup.notify)
    ours = loop_end(str(tmp_path / "channel"))
    theirs = front_end(str(tmp_path / "channel"))
    engine = assemble(config, room, wakeup, ours, serving_pb2.EngineStatus())
    ours.send(engine.front_facts)
    stop = threading.Event()
    thread = threading.Thread(target=engine.loop.run, args=(stop.is_set,))
    thread.start()
    yield LoopUnderTest(theirs, QUEUE_LIMIT)
    stop.set()
    wakeup.notify()
    thread.join()
    engine.executor.close()
    ours.close()
    theirs.close()
    wakeup.close()
