"""How much memory a replica surely needs: a lower bound. What might fit is never refused; the engine says the rest."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidelane.rpc.wire import ExecutionMode, ModelSpec, ReplicaSpec

# torch, the HTTP process and their libraries, resident, before any weights: measured 0.4 to 0.6 GiB on x86-64.
ENGINE_OVERHEAD_BYTES = 512 << 20
_LARGEST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """`device_bytes` over all of a replica's devices together; `host_bytes` beside them. On the CPU the two add up."""

    device_bytes: int
    host_bytes: int


class Weights(Protocol):
    def parameters(self, model: ModelSpec) -> int | None:
        """Number of the model's parameters; None while its files are not on this node."""
        ...


def footprint(spec: ReplicaSpec, weights: Weights) -> Footprint:
    bytes_each = 4 if spec.model.dtype == "float32" else 2
    copies = copies_of_the_model(spec)
    device_bytes = (weights.parameters(spec.model) or 0) * bytes_each * copies
    return Footprint(device_bytes, ENGINE_OVERHEAD_BYTES * copies + spec.kv_cache.host_memory_bytes)


def copies_of_the_model(spec: ReplicaSpec) -> int:
    """How many of the engine's processes load it, and have a KV pool for it."""
    return 2 if spec.objective.mode is ExecutionMode.DISAGGREGATED else 1


class StoredWeights:
    """Looks into the headers of the model store's safetensors files."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def parameters(self, model: ModelSpec) -> int | None:
        counts = [_parameters_in(files) for folder in self._folders(model.source) if (files := _files(folder))]
        return min(counts, default=None)

    def _folders(self, source: str) -> Iterable[Path]:
        # Not as a URL: a path may hold "#", "?" and "%", and means them.
        scheme, _, rest = source.partition("://")
        if scheme == "file":
            return [Path(rest)]
        if scheme == "hf":
            name = rest.partition("@")[0]
            return (self._store / "hub" / f"models--{name.replace('/', '--')}").glob("snapshots/*")
        return [self._store / scheme / rest]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) if folder.is_dir() else []


def _parameters_in(files: Iterable[Path]) -> int:
    total = 0
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, _LARGEST_HEADER_BYTES)))
            total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
        except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError):
            # An unreadable file is for the engine to report, with the model's error, not a question of room.
            return 0
    return total
