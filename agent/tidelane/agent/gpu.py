"""NVIDIA GPUs through NVML (the `pynvml` module of nvidia-ml-py).

Never run on a GPU so far: the calls are checked against the module's names, and the behaviour against a stand-in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from tidelane.agent.devices import Device, DeviceKind

log = logging.getLogger(__name__)

# NVML counts CUDA cores, and tells the number of SMs only for MIG instances. From NVIDIA's programming guide.
_CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_SM_OTHERWISE = 128


class NvmlInventory:
    """Whole GPUs. A GPU in MIG mode is reported unhealthy: its instances are not supported yet."""

    def __init__(self, nvml: ModuleType | Any) -> None:
        self._nvml = nvml
        self._known: dict[int, Device] = {}

    @classmethod
    def open(cls, nvml: ModuleType | Any) -> NvmlInventory | None:
        """None on a machine without NVIDIA's driver; any other failure of the driver is raised."""
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
            return None
        return cls(nvml)

    def devices(self) -> Sequence[Device]:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                self._known[index] = self._device(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as error:
                if index not in self._known:
                    raise
                log.warning("GPU does not answer index=%d why=%s", index, error)
                self._known[index] = replace(self._known[index], healthy=False)
        return tuple(self._known[index] for index in sorted(self._known))

    def _device(self, handle: object) -> Device:
        nvml = self._nvml
        return Device(
            id=str(nvml.nvmlDeviceGetUUID(handle)),
            kind=DeviceKind.GPU,
            name=str(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            compute_units=self._multiprocessors(handle),
            healthy=self._healthy(handle),
        )

    def _multiprocessors(self, handle: object) -> int:
        capability = tuple(self._nvml.nvmlDeviceGetCudaComputeCapability(handle))
        per_sm = _CORES_PER_SM.get(capability, _CORES_PER_SM_OTHERWISE)
        return int(self._nvml.nvmlDeviceGetNumGpuCores(handle)) // per_sm

    def _healthy(self, handle: object) -> bool:
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                return False
        except nvml.NVMLError_NotSupported:
            pass
        try:
            # (correctable, uncorrectable, pending, failed): a failed remap leaves bad memory in use.
            return not nvml.nvmlDeviceGetRemappedRows(handle)[3]
        except nvml.NVMLError_NotSupported:
            return True
