"""The CPU as one device: the cores and the memory that this process may really use, containers included."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tidelane.agent.devices import Device, DeviceKind

CPU_DEVICE_ID = "cpu"


def allowed_cores() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0))


class CpuInventory:
    """Reads affinity, CPU quota and memory limits. `root` is where /proc and /sys are found."""

    def __init__(
        self, slots: int = 1, root: Path = Path("/"), allowed_cores: Callable[[], Sequence[int]] = allowed_cores
    ) -> None:
        if slots < 1:
            raise ValueError("slots must be at least 1")
        self._slots = slots
        self._root = root
        self._allowed_cores = allowed_cores

    def devices(self) -> Sequence[Device]:
        cores = tuple(self._allowed_cores())
        quota = cpu_quota(self._root)
        if quota is not None:
            # Threads on more cores than the quota pays for are all stopped together for the rest of each period.
            cores = cores[: max(1, int(quota))]
        return (
            Device(
                id=CPU_DEVICE_ID,
                kind=DeviceKind.CPU,
                name=_processor_name(self._root),
                memory_bytes=memory_limit_bytes(self._root),
                compute_units=len(cores),
                slots=self._slots,
                cores=cores,
            ),
        )


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that control groups allow; None: no limit."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        if limit := _words(folder / "cpu.max"):
            if limit[0] != "max":
                quotas.append(int(limit[0]) / int(limit[1]))
        elif (quota := _words(folder / "cpu.cfs_quota_us")) and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(_words(folder / "cpu.cfs_period_us")[0]))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path) -> int:
    """The machine's memory, or less where a control group says so."""
    meminfo = (root / "proc/meminfo").read_text()
    limits = [next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:"))]
    for folder in _group_folders(root, "memory"):
        words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        if words and words[0] != "max":
            limits.append(int(words[0]))
    return min(limits)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, innermost first, of version 2 and of version 1."""
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            tops = [mounts / controllers, mounts / controller]
        else:
            continue
        for top in tops:
            if top.is_dir():
                inner = top / path.lstrip("/")
                # In a container the path may be the host's, which is not mounted here; the top is then our own group.
                yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))
                break


def _processor_name(root: Path) -> str:
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
