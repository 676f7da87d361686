"""Either process may die at any moment: nothing leaks, no token changes, and whoever decodes does not notice."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine.core.models import save
from engine.handover.processes import prefill_sides, runs
from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.channel import ToFront, Tokens
from tidelane.engine.errors import CannotServe, PrefillSideLost
from tidelane.engine.handover.config import PrefillConfig
from tidelane.engine.handover.messages import Compute, Prompt
from tidelane.engine.handover.prefill_side import LEASE_S, Down, News, PrefillSide, Up
from tidelane.engine.kv.cache import Holding
from tidelane.engine.kv.shared import SharedMemory
from tidelane.engine.ledger import MOST_PREFILLS_LOST
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.request import FinishReason, Request, Sampling
from tidelane.engine.scheduling.plan import PrefillSlice, Span
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
BLOCKS = 800
GONE_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder, "float32", None, torch.device("cpu"))


def request(name: str, prompt: int, new: int) -> Request:
    tokens = tuple(3 + (at * 7 + len(name)) % 500 for at in range(prompt))
    bias = ((2, -1e9),)  # no end of text
    return Request(name, tokens, new, Sampling(seed=0, temperature=0.0, logit_bias=bias), arrival_s=time.monotonic())


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> Callable[[Request], list[int]]:
    """The tokens of one engine that is one process, on one core as either side is."""

    def answer(request: Request) -> list[int]:
        with InProcessEngine(loaded, cores=(0,), mode=ExecutionMode.MIXED_BATCH, kv_blocks=BLOCKS) as engine:
            engine.submit(request)
            engine.run()
            return engine.answers()[request.id]

    return answer


class Apart(InProcessEngine):
    """An engine of two processes, and what tests do to the other one."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded, cores=(0, 1), mode=ExecutionMode.DISAGGREGATED, kv_blocks=BLOCKS)
        assert self.prefill_side is not None
        self.side = self.prefill_side

    def signal_prefill(self, number: signal.Signals) -> int:
        pid = self.side.pid
        assert pid is not None
        os.kill(pid, number)
        return pid

    def run_until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        self.run(until=lambda: true() or time.monotonic() > deadline_s)
        assert true()

    @property
    def can_prefill(self) -> bool:
        return self.ledger.state().can_prefill

    def count(self, name: str) -> int:
        return len(self.answers().get(name, []))

    def gaps(self, name: str) -> list[float]:
        times = self.token_times()[name]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Apart]:
    names = set(Path("/dev/shm").iterdir())
    with Apart(loaded) as engine:
        yield engine
        assert engine.ledger.pool.free == BLOCKS
    assert prefill_sides(os.getpid()) == []
    assert set(Path("/dev/shm").iterdir()) == names


def descriptors() -> Counter[str]:
    """What this process has open, once nothing is kept that nobody needs."""
    gc.collect()
    return Counter(str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())


# ---- the prefill side dies ------------------------------------------------------------------------------------------


def test_killed_while_idle_it_is_there_for_the_next_prompt(
    engine: Apart, expected: Callable[[Request], list[int]]
) -> None:
    dead = engine.signal_prefill(signal.SIGKILL)
    engine.run_until(lambda: not engine.can_prefill)
    wanted = request("a", 100, 5)
    engine.submit(wanted)
    engine.run()
    assert engine.answers()["a"] == expected(wanted)
    assert engine.side.pid != dead


def test_killed_with_a_slice_in_hand_its_prompt_is_computed_again_and_streams_go_on(
    engine: Apart, expected: Callable[[Request], list[int]]
) -> None:
    stream, prompt = request("stream", 50, 1500), request("prompt", 1200, 6)
    engine.submit(stream)
    engine.run_until(lambda: engine.count("stream") > 0)
    engine.signal_prefill(signal.SIGSTOP)  # so that it has the slice and is not done with it
    engine.submit(prompt)
    engine.run_until(lambda: engine.ledger.flight.prefill is not None)
    engine.signal_prefill(signal.SIGKILL)
    engine.run_until(lambda: not engine.can_prefill)
    assert engine.ledger.waiting == 1
    at_loss = engine.count("stream")
    engine.run_until(lambda: engine.can_prefill)
    assert engine.count("stream") > at_loss + 20  # it went on while the other side was away
    engine.run()
    assert engine.answers() == {"stream": expected(stream), "prompt": expected(prompt)}
    endings = engine.endings().values()
    assert all(isinstance(end, Tokens) and end.finish is FinishReason.LENGTH for end in endings)
    assert max(engine.gaps("stream")) < 1.0


@pytest.mark.parametrize("tokens_heard", [0, 1, 3, 8])
def test_killed_at_any_token_of_a_mixed_load_every_answer_is_right(
    engine: Apart, expected: Callable[[Request], list[int]], tokens_heard: int
) -> None:
    wanted = [request(f"r{length}", length, 5) for length in (10, 700, 40, 1500, 300)]
    heard = 0

    def count(message: ToFront) -> None:
        nonlocal heard
        heard += isinstance(message, Tokens)
        if heard >= tokens_heard and engine.side.pid == first:
            engine.signal_prefill(signal.SIGKILL)

    first = engine.side.pid
    engine.desk.heard = count
    for each in wanted:
        engine.submit(each)
    engine.run()
    assert engine.answers() == {each.id: expected(each) for each in wanted}


def test_killed_while_it_starts_again_it_is_started_once_more(
    engine: Apart, expected: Callable[[Request], list[int]]
) -> None:
    first = engine.signal_prefill(signal.SIGKILL)
    engine.run_until(lambda: not engine.can_prefill and engine.side.pid not in (first, None))
    second = engine.signal_prefill(signal.SIGKILL)
    wanted = request("a", 100, 5)
    engine.submit(wanted)
    engine.run()
    assert engine.answers()["a"] == expected(wanted)
    assert engine.side.pid not in (first, second)


def test_a_prompt_that_it_always_dies_of_gets_one_error(engine: Apart) -> None:
    engine.submit(request("poison", 1200, 5))
    for _ in range(MOST_PREFILLS_LOST):
        engine.run_until(lambda: engine.can_prefill and engine.side.pid is not None)
        engine.signal_prefill(signal.SIGSTOP)
        engine.run_until(lambda: engine.ledger.flight.prefill is not None)
        engine.signal_prefill(signal.SIGKILL)
        engine.run_until(lambda: not engine.can_prefill)
    end = engine.endings()["poison"]
    assert isinstance(end, Tokens)
    assert end.finish is FinishReason.ERROR
    assert engine.ledger.empty


def test_a_request_that_leaves_while_the_other_side_hangs_frees_its_blocks_when_that_is_dead(engine: Apart) -> None:
    engine.signal_prefill(signal.SIGSTOP)
    engine.submit(request("gone", 1200, 5))
    engine.run_until(lambda: engine.ledger.flight.prefill is not None)
    engine.abort("gone")
    engine.run_until(lambda: not engine.desk.unread)
    assert engine.ledger.pool.free < BLOCKS  # the other side may still write there
    engine.signal_prefill(signal.SIGKILL)
    engine.run_until(lambda: engine.ledger.pool.free == BLOCKS)


# ---- the lease ------------------------------------------------------------------------------------------------------


class Bench:
    """A prefill side alone, whose leases run by a clock of the test's own."""

    def __init__(self, loaded: LoadedModel, cores: tuple[int, ...] = (1,)) -> None:
        self.now_s = 0.0
        size = BLOCKS * loaded.facts.kv_layout.block_bytes
        memory = SharedMemory(size)
        config = PrefillConfig(
            folder=str(loaded.facts.folder),
            dtype="float32",
            max_context_tokens=None,
            cores=cores,
            blocks=BLOCKS,
            memory_fd=memory.fd,
        )
        self.side = PrefillSide(config, memory, lambda: None, lambda: self.now_s)

    def next_news(self) -> News:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (news := self.side.news()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)  # the interval of a poll with a deadline
        (only,) = news
        return only


def test_one_that_does_not_answer_loses_its_lease_and_its_life(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    try:
        bench.side.ready()
        assert bench.next_news() == Up(1)
        pid = bench.side.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        sequence = Sequence(request("a", 64, 1), Slo(1.0, 0.1))
        sequence.holding = Holding([0, 1, 2, 3, 4])
        whole = PrefillSlice(1, (Span("a", 0, 64),), 0, loaded.facts.layers)
        bench.side.order(1, Compute(whole, 1, (Prompt.of(sequence),)))
        bench.now_s = LEASE_S - 1
        assert bench.side.news() == []
        assert psutil.pid_exists(pid)
        bench.now_s = LEASE_S
        assert bench.next_news() == Down(1)
        assert not psutil.pid_exists(pid)
        assert bench.next_news() == Up(2)
    finally:
        bench.side.close()


def test_a_first_start_that_fails_is_told_with_its_kind(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded)
    try:
        while bench.side.pid is None:
            time.sleep(0.01)  # the interval of a poll with a deadline
        os.kill(bench.side.pid, signal.SIGKILL)
        with pytest.raises(PrefillSideLost, match="ended with code -9 before it was ready"):
            bench.side.ready()
    finally:
        bench.side.close()


def test_a_model_that_it_cannot_load_can_never_be_served(tmp_path: Path) -> None:
    loaded = load(save("llama", tmp_path / "llama"), "float32", None, torch.device("cpu"))
    (tmp_path / "llama" / "config.json").write_text("{")
    bench = Bench(loaded)
    try:
        with pytest.raises(CannotServe, match=r"the prefill side: .*config\.json: JSONDecodeError"):
            bench.side.ready()
    finally:
        bench.side.close()


def test_closed_it_leaves_no_descriptor_and_no_memory(loaded: LoadedModel) -> None:
    before = descriptors()

    def live() -> None:
        with Apart(loaded) as engine:
            assert any("memfd:tidelane-kv" in name for name in descriptors() - before)
            engine.signal_prefill(signal.SIGKILL)
            engine.run_until(lambda: not engine.can_prefill)
            engine.run_until(lambda: engine.can_prefill)

    live()
    assert descriptors() == before


# ---- the decode side dies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["starting", "idle", "computing", "stopped"])
def test_when_the_decode_side_is_killed_the_other_is_gone_within_two_seconds(folder: Path, moment: str) -> None:
    names = set(Path("/dev/shm").iterdir())
    script = Path(__file__).with_name("decode_side.py")
    with subprocess.Popen([sys.executable, script, folder, moment], stdout=subprocess.PIPE) as decode_side:
        assert decode_side.stdout is not None
        if moment != "starting":
            assert decode_side.stdout.readline() == b"there\n"
        deadline_s = time.monotonic() + PATIENCE_S
        while not (sides := prefill_sides(decode_side.pid)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)  # the interval of a poll with a deadline
        decode_side.kill()
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while any(runs(side) for side in sides):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)  # the interval of a poll with a deadline
    assert set(Path("/dev/shm").iterdir()) == names
