"""A prompt larger than the pool through the real loop, executor and model: the tokens of a run with a large pool."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from tidelane.engine.channel import Abort, Submit, Tokens
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.execution.watched import WatchedExecutor, WatchedMover
from tidelane.engine.kv.canary import Canary
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_copier import HostCopier
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.kv.mover import CopyingMover
from tidelane.engine.kv.retention import IDLE_TIMEOUT_S, ByServiceTier
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.kv.traffic import PartRead, Traffic
from tidelane.engine.lanes.cores import CpuLanes
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.request import FinishReason, Request, Sampling
from tidelane.engine.scheduling.plan import Objective
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.slo import Slo
from tidelane.engine.usage import Usage
from tidelane.engine.wakeup import Wakeup

from .models import save
from .virtual import MemoryDesk, true_estimates

pytestmark = pytest.mark.slow

PROMPT = 700
NEW_TOKENS = 40
SMALL_POOL = 24  # 384 tokens, of which 6 blocks are the run of a stream
HOST_SLOTS = 60
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save("llama", tmp_path_factory.mktemp("llama")), "float32", None, torch.device("cpu"))


@dataclass
class Engine:
    loop: Loop
    ledger: Ledger
    desk: MemoryDesk
    wakeup: Wakeup
    host: HostMemory
    traffic: Traffic

    def submit(self, *requests: Request) -> None:
        self.desk.inbox += [Submit(each) for each in requests]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Turns the loop whenever something has ended."""
        until_s = time.monotonic() + LIMIT_S
        self.loop.turn()
        while not done():
            assert time.monotonic() < until_s
            self.loop.turn()
            select.select([self.wakeup.fileno()], [], [], 0.05)
            self.wakeup.clear()

    def tokens(self, name: str) -> list[int]:
        sent = [each for each in self.desk.sent if isinstance(each, Tokens) and each.request_id == name]
        return [new.token_id for each in sent for new in each.new]

    def endings(self, name: str) -> list[FinishReason | None]:
        sent = [each for each in self.desk.sent if isinstance(each, Tokens) and each.request_id == name]
        return [each.finish for each in sent if each.finish is not None]


@pytest.fixture
def engine(llama: LoadedModel) -> Iterator[Callable[..., Engine]]:
    closing: list[Callable[[], None]] = []

    def build(mode: str, blocks: int, host_slots: int) -> Engine:
        model, layout = SlicedModel(llama.module), llama.facts.kv_layout
        pool = DevicePool.allocate(layout, blocks, torch.float32, torch.device("cpu"))
        host, traffic = HostMemory.allocate(layout, max(1, host_slots)), Traffic()
        # What is read before it was written shows.
        for part in (*pool.keys, *pool.values, host.memory.view(torch.float32)):
            part.fill_(float("nan"))
        table = partition_table(2)
        lanes, wakeup, desk = CpuLanes((0, 1), table), Wakeup(), MemoryDesk(mode)
        ledger = Ledger(
            table=table,
            layers=model.layers,
            block_tokens=layout.block_tokens,
            blocks=blocks,
            queue_limit=100,
            objective=Objective(Slo(ttft_s=1.0, tpot_s=0.2)),
            estimates=true_estimates(2, model.layers),
            ended=lambda *_: None,
            retention=lambda: ByServiceTier(IDLE_TIMEOUT_S, time.monotonic),
            names=TokenNames(b"llama", layout.block_tokens),
            host_slots=host_slots,
            stream_run=StreamRun.at_end_of(blocks) if host_slots else None,
        )
        executor = CpuExecutor(model, pool, lanes, ledger.sequences, wakeup.notify, below=(host, traffic))
        mover = CopyingMover([HostCopier(pool, host)], wakeup.notify, traffic)
        canary = Canary(blocks, layout.block_tokens, pool.prints)
        watched = WatchedExecutor(executor, canary, ledger.sequences, model.layers)
        loop = Loop(
            ledger=ledger,
            policies={"lanes": policy("lanes"), "mixed": policy("mixed", "own"), "auto": policy("auto")},
            executor=watched,
            mover=WatchedMover(mover, canary),
            desk=desk,
            usage=Usage(2, time.monotonic()),
            clock=time.monotonic,
        )
        closing.extend((watched.close, mover.close, wakeup.close))
        return Engine(loop, ledger, desk, wakeup, host, traffic)

    yield build
    for close in closing:
        close()


def asked(name: str, prompt: int, new: int, seed: int) -> Request:
    chance = random.Random(seed)
    tokens = tuple(chance.randrange(3, 512) for _ in range(prompt))
    return Request(name, tokens, new, Sampling(seed=0, temperature=0.0), arrival_s=time.monotonic())


def nothing_is_held(here: Engine) -> None:
    here.run_until(lambda: here.ledger.pool.still)
    cache = here.ledger.pool
    assert (cache.free, cache.device.kept, cache.host.pinned) == (cache.total, 0, 0)


@pytest.mark.parametrize("mode", ["lanes", "mixed", "auto"])
def test_the_tokens_are_those_of_a_large_pool_beside_short_requests(engine: Callable[..., Engine], mode: str) -> None:
    shorts = [asked(f"short{at}", 50, 60, seed=at) for at in range(4)]
    resident = engine(mode, 60, 0)
    resident.submit(asked("long", PROMPT, NEW_TOKENS, seed=77))
    resident.run_until(lambda: resident.ledger.empty)
    here = engine(mode, SMALL_POOL, HOST_SLOTS)
    here.submit(shorts[0], shorts[1], asked("long", PROMPT, NEW_TOKENS, seed=77))
    here.run_until(lambda: bool(here.tokens("long")) or here.ledger.empty)
    here.submit(*shorts[2:])
    here.run_until(lambda: here.ledger.empty)
    assert len(here.tokens("long")) == NEW_TOKENS
    assert here.tokens("long") == resident.tokens("long")
    assert here.traffic.of(PartRead).bytes > NEW_TOKENS * 600 * here.host.layout.token_bytes
    assert all(here.endings(each.id) == [FinishReason.LENGTH] for each in shorts)
    nothing_is_held(here)


def test_aborts_at_any_moment_leave_nothing_behind(engine: Callable[..., Engine]) -> None:
    here = engine("lanes", SMALL_POOL, HOST_SLOTS)
    chance = random.Random(3)
    for number in range(12):
        name = f"long{number}"
        here.submit(asked(name, 400 + 16 * number, 10, seed=number), asked(f"short{number}", 40, 8, seed=100 + number))
        steps, after = here.ledger.steps, chance.randrange(40)
        here.run_until(lambda steps=steps, after=after: here.ledger.steps >= steps + after or here.ledger.empty)  # type: ignore[misc]
        here.desk.inbox.append(Abort(name, FinishReason.ABORTED))
    here.submit(asked("last", PROMPT, 5, seed=77))
    here.run_until(lambda: here.ledger.empty)
    assert len(here.tokens("last")) == 5
    nothing_is_held(here)


def test_a_read_that_fails_is_made_again_and_the_tokens_are_the_same(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = engine("mixed", 60, 0)
    resident.submit(asked("long", PROMPT, 12, seed=77))
    resident.run_until(lambda: resident.ledger.empty)
    load_run, reads = HostMemory.load_run, [0]

    def most_reads(self: HostMemory, *arguments: object) -> None:
        reads[0] += 1
        if reads[0] % 700 == 0:
            raise OSError("a bad page")
        load_run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(HostMemory, "load_run", most_reads)
    here = engine("mixed", SMALL_POOL, HOST_SLOTS)
    here.submit(asked("long", PROMPT, 12, seed=77))
    here.run_until(lambda: here.ledger.empty)
    assert here.traffic.of(PartRead).failed > 1
    assert here.tokens("long") == resident.tokens("long")
    nothing_is_held(here)
