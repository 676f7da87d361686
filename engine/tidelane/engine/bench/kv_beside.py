"""What decode pays while KV is copied: the time between its steps, with and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from tidelane.engine.bench.engine_cases import PROMPT_TOKENS, request
from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.bench.kv_rates import MovesLost
from tidelane.engine.bench.kv_report import Sizes
from tidelane.engine.bench.kv_turns import OtherCase
from tidelane.engine.bench.ratio import Measured, Ratio, interleaved
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_copier import HostCopier
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import KEY_BYTES
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.mover import CopyingMover
from tidelane.engine.kv.moves import Arrival, Load, Move, Mover, Store
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.slo import percentile
from tidelane.engine.tiers import Below

AT_MOST = 1.1
_STREAMS = 4
_LEAD_TOKENS = 3  # of each stream, before steps are timed
# Streams do not begin in the same step; the first of them must not end before the last has been timed.
_SPARE_TOKENS = 64
_QUEUED = 2  # of each kind of copy


def decode_beside_copies(loaded: LoadedModel, cores: Sequence[int], sizes: Sizes) -> Ratio:
    """Four streams decode; beside them one conversation after another is loaded, and one after another stored, with no
    pause, by the engine's own threads."""
    layout = loaded.facts.kv_layout
    answer_tokens = _LEAD_TOKENS + sizes.steps + _SPARE_TOKENS
    blocks = _STREAMS * (layout.blocks_for(PROMPT_TOKENS + answer_tokens) + 1)
    copies = Copies(layout, layout.blocks_for(sizes.history_tokens))

    def tiers(pool: DevicePool, notify: Callable[[], None]) -> Below:
        copies.open(pool.keys[0].dtype, notify)
        return Below(copies)

    moved: list[float] = []
    phases = 0
    with InProcessEngine(loaded, cores=cores, kv_blocks=blocks, open_tiers=tiers) as engine:

        def gap_ms(*, beside: bool) -> float:
            nonlocal phases
            phases += 1
            copies.wanted = beside
            bytes_before, begun_s = copies.moved_bytes, time.monotonic()
            gaps_s = _gaps_s(engine, f"phase {phases}", answer_tokens, sizes.steps)
            if beside:
                moved.append((copies.moved_bytes - bytes_before) / (time.monotonic() - begun_s) / 1e9)
            copies.wanted = False
            engine.run(until=lambda: copies.idle)
            return 1000 * percentile(gaps_s, 99)

        gap_ms(beside=False)  # warms the lanes up
        over, under = interleaved(lambda: gap_ms(beside=True), lambda: gap_ms(beside=False), sizes.rounds)
    copied = Measured("copied", tuple(moved), "GB/s")
    return Ratio(
        "p99 between steps",
        Measured("copies", over, "ms"),
        Measured("alone", under, "ms"),
        at_most=AT_MOST,
        price=f"{_STREAMS} streams, {sizes.steps} steps a phase; {copied} beside them",
    )


def _gaps_s(engine: InProcessEngine, name: str, tokens: int, steps: int) -> list[float]:
    """Between steps that all streams take part in. Raises OtherCase if one of them ends before."""
    chats = [f"{name}, stream {number}" for number in range(_STREAMS)]
    live, ends = engine.ledger.sequences, len(engine.ended)
    for chat in chats:
        engine.submit(request(chat, PROMPT_TOKENS, tokens))

    def spoken(chat: str) -> int:
        return live[chat].output_tokens if chat in live else 0

    def run_until(there: Callable[[], bool]) -> None:
        engine.run(until=lambda: there() or len(engine.ended) > ends)
        if len(engine.ended) > ends:
            raise OtherCase("a stream ended before the others had begun: there were no steps of all of them")

    run_until(lambda: all(spoken(chat) >= _LEAD_TOKENS for chat in chats))
    timed, first = chats[0], spoken(chats[0])
    run_until(lambda: spoken(timed) >= first + steps)
    for chat in chats:
        engine.abort(chat)
    engine.run()
    times_s = engine.token_times()[timed][first - 1 : first + steps]
    return [later - earlier for earlier, later in pairwise(times_s)]


class Copies:
    """A mover that the books know nothing of: while it is `wanted`, each load and store of `blocks` that ends is
    followed by another when the loop polls, as in an engine with that much to move. It copies from and to a pool of its
    own, so that nobody's KV is written over. `open` it before use."""

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self._layout = layout
        # Stores take other blocks and slots than loads, as they do in an engine.
        self._loaded, self._stored = tuple(range(blocks)), tuple(range(blocks, 2 * blocks))
        self._mover: Mover
        self._loads = 0
        self._stores = 0
        self._number = 0
        self.wanted = False
        self.moved_bytes = 0

    def open(self, dtype: torch.dtype, notify: Callable[[], None]) -> None:
        pool = DevicePool.allocate(self._layout, 2 * len(self._loaded), dtype, torch.device("cpu"))
        host = HostMemory.allocate(self._layout, 2 * len(self._loaded))
        host.memory.fill_(1)  # pages that nobody has written to are all one page of zeros
        self._mover = CopyingMover([HostCopier(pool, host)], notify, Traffic())

    @property
    def idle(self) -> bool:
        return not (self._loads or self._stores)

    def start(self, moves: Sequence[Move]) -> None:
        assert not moves

    def poll(self) -> Sequence[tuple[Move, bool]]:
        """Raises MovesLost."""
        for move, well in self._mover.poll():
            if not well:
                raise MovesLost("a copy of KV beside decode failed")
            if isinstance(move, Load):
                self._loads -= 1
                self.moved_bytes += len(move.blocks) * self._layout.block_bytes
            else:
                self._stores -= 1
                self.moved_bytes += self._layout.block_bytes
        if self.wanted:
            self._start_more()
        return ()

    def close(self) -> None:
        self._mover.close()

    def _start_more(self) -> None:
        # One is queued behind the one under way, so that no thread waits for the loop.
        key = bytes(KEY_BYTES)
        while self._loads < _QUEUED:
            self._loads += 1
            keys = (key,) * len(self._loaded)
            self._mover.start([Load(self._next(), keys, self._loaded, self._loaded, Arrival())])
        while self._stores < _QUEUED * len(self._stored):
            self._stores += len(self._stored)
            self._mover.start([Store(self._next(), key, at, at) for at in self._stored])

    def _next(self) -> int:
        self._number += 1
        return self._number
