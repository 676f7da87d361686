"""Inventories: one contract for all, control groups of both versions, NVML through a stand-in, model footprints."""

# ruff: noqa: N802 - the stand-in has the names that NVML has.

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.rig import GIB, cpu, gpu, spec
from tidelane.agent.cpu import CpuInventory, cpu_quota, memory_limit_bytes
from tidelane.agent.devices import DeviceInventory, DeviceKind, FirstFound, FixedInventory
from tidelane.agent.errors import CannotStart
from tidelane.agent.footprint import ENGINE_OVERHEAD_BYTES, Footprint, StoredWeights, footprint
from tidelane.agent.gpu import NvmlInventory
from tidelane.agent.inventory import find_inventory
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode, KvCacheSpec, ModelSpec, Objective


class FakeNvml:
    """Answers as NVML does for healthy and for broken GPUs; errors are the real module's."""

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE

    def __init__(self, *gpus: dict[str, Any], missing: bool = False) -> None:
        self.gpus = list(gpus)
        self.missing = missing

    def nvmlInit(self) -> None:
        if self.missing:
            raise pynvml.NVMLError_LibraryNotFound

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if self.gpus[index].get("lost"):
            raise pynvml.NVMLError_GpuIsLost
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:
        return str(handle["uuid"])

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=141 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: dict[str, Any]) -> Any:
        return handle.get("capability", (9, 0))

    def nvmlDeviceGetNumGpuCores(self, handle: dict[str, Any]) -> int:
        return int(handle.get("cores", 16896))

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        return [int(handle.get("mig", False))] * 2

    def nvmlDeviceGetRemappedRows(self, handle: dict[str, Any]) -> tuple[int, int, int, int]:
        if "remap_failed" not in handle:
            raise pynvml.NVMLError_NotSupported
        return (0, 0, 0, int(handle["remap_failed"]))


@pytest.mark.parametrize(
    "inventory",
    [
        CpuInventory(),
        CpuInventory(slots=3),
        FixedInventory([gpu(0), gpu(1)]),
        NvmlInventory(FakeNvml({"uuid": "GPU-a"}, {"uuid": "GPU-b"})),
        FirstFound([FixedInventory([]), FixedInventory([cpu()])]),
        find_inventory(),
    ],
)
def test_every_inventory_keeps_the_contract(inventory: DeviceInventory) -> None:
    devices = inventory.devices()
    assert devices
    assert len({device.id for device in devices}) == len(devices)
    assert [device.id for device in inventory.devices()] == [device.id for device in devices]
    for device in devices:
        assert device.id
        assert device.name
        assert device.memory_bytes > 0
        assert device.compute_units > 0
        assert device.slots >= 1
        assert device.healthy
        assert len(device.cores) == (device.compute_units if device.kind is DeviceKind.CPU else 0)


# ---- CPU -------------------------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n", **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1_UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("files", "quota", "memory_bytes"),
    [
        ({}, None, 16 * GIB),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
                "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/pod/memory.max": "4294967296\n",
            },
            2.5,
            4 * GIB,
        ),
        (
            # A container's own namespace: its group is the root of what is mounted.
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/memory.max": "2147483648\n",
            },
            1.5,
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1073741824\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            },
            3.0,
            GIB,
        ),
        (
            # The path is the host's, which is not mounted in the container.
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            },
            None,
            16 * GIB,
        ),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None, memory_bytes: int
) -> None:
    root = tree(tmp_path, files)
    assert cpu_quota(root) == quota
    assert memory_limit_bytes(root) == memory_bytes


@pytest.mark.parametrize(
    ("quota", "used"), [("max", (2, 5, 7)), ("250000", (2, 5)), ("50000", (2,)), ("900000", (2, 5, 7))]
)
def test_cores_are_those_allowed_and_paid_for(tmp_path: Path, quota: str, used: Sequence[int]) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    files["proc/cpuinfo"] = "processor : 0\nmodel name\t: A Processor\n"
    [device] = CpuInventory(root=tree(tmp_path, files), allowed_cores=lambda: (2, 5, 7)).devices()
    assert device.cores == used
    assert device.compute_units == len(used)
    assert device.name == "A Processor"


def test_on_this_machine_the_cpu_has_the_cores_of_the_affinity() -> None:
    [device] = CpuInventory().devices()
    assert set(device.cores) <= os.sched_getaffinity(0)


# ---- GPU -------------------------------------------------------------------------------------------------------------


def test_the_stand_in_has_only_names_that_nvml_has() -> None:
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert names
    assert [name for name in names if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("capability", "cores", "multiprocessors"),
    [((9, 0), 16896, 132), ((8, 0), 6912, 108), ((8, 9), 18176, 142), ((7, 5), 2560, 40), ((10, 0), 18944, 148)],
)
def test_multiprocessors_follow_from_cores(capability: tuple[int, int], cores: int, multiprocessors: int) -> None:
    nvml = FakeNvml({"uuid": "GPU-a", "capability": capability, "cores": cores})
    assert NvmlInventory(nvml).devices()[0].compute_units == multiprocessors


def test_broken_gpus_are_shown_but_not_healthy() -> None:
    nvml = FakeNvml(
        {"uuid": "GPU-a", "remap_failed": True},
        {"uuid": "GPU-b", "mig": True},
        {"uuid": "GPU-c", "remap_failed": False},
    )
    inventory = NvmlInventory(nvml)
    assert [device.healthy for device in inventory.devices()] == [False, False, True]
    nvml.gpus[2]["lost"] = True
    lost = inventory.devices()[2]
    assert (lost.id, lost.healthy) == ("GPU-c", False)
    del nvml.gpus[2]["lost"]
    assert inventory.devices()[2].healthy


def test_a_machine_without_the_driver_has_no_gpu_inventory() -> None:
    assert NvmlInventory.open(FakeNvml(missing=True)) is None
    assert NvmlInventory.open(FakeNvml({"uuid": "GPU-a"})) is not None


def test_a_gpu_node_without_its_driver_does_not_become_a_cpu_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmlInventory, "open", lambda _: None)
    with pytest.raises(CannotStart, match="no NVIDIA driver"):
        find_inventory("gpu")
    assert [device.kind for device in find_inventory("cpu").devices()] == [DeviceKind.CPU]


# ---- footprint -------------------------------------------------------------------------------------------------------


def safetensors(path: Path, *shapes: tuple[int, ...]) -> None:
    header = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": shape} for i, shape in enumerate(shapes)} | {"__metadata__": {}}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("builtin://tiny", "builtin/tiny"),
        ("pvc://claim/some/model", "pvc/claim/some/model"),
        ("hf://org/tiny@main", "hub/models--org--tiny/snapshots/abc"),
    ],
)
def test_parameters_are_counted_from_the_store(tmp_path: Path, source: str, place: str) -> None:
    weights = StoredWeights(tmp_path)
    model = ModelSpec(source, "tiny")
    assert weights.parameters(model) is None
    safetensors(tmp_path / place / "a.safetensors", (10, 20), (5,))
    safetensors(tmp_path / place / "b.safetensors", (7,))
    assert weights.parameters(model) == 212


def test_a_file_source_and_a_broken_file(tmp_path: Path) -> None:
    model = ModelSpec(f"file://{tmp_path}/m", "m")
    safetensors(tmp_path / "m" / "a.safetensors", (3,))
    assert StoredWeights(tmp_path).parameters(model) == 3
    (tmp_path / "m" / "a.safetensors").write_bytes(b"\xff")
    assert StoredWeights(tmp_path).parameters(model) == 0


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2), ("auto", 2)])
def test_the_footprint_is_weights_overhead_and_reserved_kv(tmp_path: Path, dtype: str, bytes_each: int) -> None:
    safetensors(tmp_path / "builtin/tiny/a.safetensors", (1000,))
    wanted = spec(model=ModelSpec("builtin://tiny", "tiny", dtype), kv_cache=KvCacheSpec(host_memory_bytes=GIB))
    need = footprint(wanted, StoredWeights(tmp_path))
    assert need.device_bytes == 1000 * bytes_each
    assert need.host_bytes == ENGINE_OVERHEAD_BYTES + GIB


def test_an_engine_of_two_processes_needs_the_weights_twice(tmp_path: Path) -> None:
    safetensors(tmp_path / "builtin/tiny/a.safetensors", (1000,))
    apart = Objective(Slo(ttft_s=1.0, tpot_s=0.1), ExecutionMode.DISAGGREGATED)
    need = footprint(
        spec(model=ModelSpec("builtin://tiny", "tiny", "float32"), objective=apart), StoredWeights(tmp_path)
    )
    assert need == Footprint(2 * 4000, 2 * ENGINE_OVERHEAD_BYTES)
