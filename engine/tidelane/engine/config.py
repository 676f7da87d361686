"""How one engine is to run: parsed once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidelane.rpc.wire import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """What computes. `cores` empty: all that this process may use. `kv_pool_bytes` None: chosen from free memory.

    `device` "auto" takes a GPU if there is one and no cores were named.
    """

    model: str
    model_store: Path
    dtype: str = "auto"
    max_context_tokens: int | None = None
    kv_pool_bytes: int | None = None
    cores: tuple[int, ...] = ()
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(ComputeConfig):
    """`profile` None: the one kept in the model store for this model and device, if there is one.

    `kv_host_bytes` of host memory are for KV that has no room in the pool, and `kv_disk_bytes` of disk, in
    `kv_disk_folder`, for what has none there; both hold it as `kv_dtype` says, the name of a codec; auto: as it is.
    What nobody used for `kv_idle_timeout_s` goes first when room is needed; None: the engine's own choice of that.
    `kv_prefetch`: it is brought up before its conversation should go on.
    """

    served_name: str
    objective: Objective
    host: str = "127.0.0.1"
    port: int = 8000
    profile: Path | None = None
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_folder: Path | None = None
    kv_dtype: str = "auto"
    kv_idle_timeout_s: float | None = None
    kv_prefetch: bool = False
    control_socket: Path | None = None
    queue_limit: int = 256
    log_level: str = "info"
