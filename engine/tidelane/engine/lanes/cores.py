"""CPU lanes: worker threads pinned to cores, one per part of every partition.

torch keeps one OpenMP team per calling thread, and a team keeps the cores it was born on. So each part gets a thread of
its own, pinned before its first torch call, and moving the border means handing work to another thread - as on a GPU it
means launching on another stream, never changing one.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from tidelane.engine.lanes.partition import PartitionTable

Work = Callable[[], None]


class CoreLane:
    """One worker thread on `cores`; runs what it is given, in order, with as many torch threads as it has cores."""

    def __init__(self, name: str, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Run `work` on the lane; it must not raise."""
        self._work.put(work)

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        os.sched_setaffinity(0, self.cores)  # 0: this thread, and the OpenMP team it will start
        # A thread's first torch call takes over the number that any thread set last, so that call comes before ours.
        torch.get_num_threads()
        torch.set_num_threads(len(self.cores))
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()


def leave_compute_to_lanes() -> None:
    """Call in the thread that will not compute, before it loads a model: a team too many halves the speed of all.

    libgomp counts the threads of all teams, idle ones too. Once they outnumber the cores, its barriers stop spinning
    and sleep, some 400 times in each decode step. (Splits that give both lanes several cores outnumber them by design.)
    """
    torch.set_num_threads(1)


class CpuLanes:
    """The lanes of all partitions of `cores`: `decode(n)` owns the first n cores, `prefill(n)` the last n.

    A core may be named twice, which makes two units share it: a machine of two cores can so run the splits of four.
    """

    def __init__(self, cores: Sequence[int], table: PartitionTable) -> None:
        if table.units != len(cores):
            raise ValueError(f"the table splits {table.units} units, but there are {len(cores)} cores")
        self.table = table
        self.cores = tuple(cores)
        whole = CoreLane("whole", cores)
        self._decode = {table.units: whole}
        self._prefill = {table.units: whole}
        for row in table.splits:
            self._decode[row.decode_units] = CoreLane(f"decode-{row.decode_units}", cores[: row.decode_units])
            self._prefill[row.prefill_units] = CoreLane(f"prefill-{row.prefill_units}", cores[-row.prefill_units :])

    def decode(self, units: int) -> CoreLane:
        return self._decode[units]

    def prefill(self, units: int) -> CoreLane:
        return self._prefill[units]

    @property
    def decode_lanes(self) -> Mapping[int, CoreLane]:
        """By their number of units, the whole device among them."""
        return self._decode

    @property
    def prefill_lanes(self) -> Mapping[int, CoreLane]:
        return self._prefill

    def close(self) -> None:
        for lane in {*self._decode.values(), *self._prefill.values()}:
            lane.close()
