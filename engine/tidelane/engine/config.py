"""How one engine is to run: parsed once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidelane.rpc.wire import Objective


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`cores` empty: all that this process may use. `kv_pool_bytes` None: chosen from the machine's free memory."""

    model: str
    model_store: Path
    served_name: str
    objective: Objective
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    max_context_tokens: int | None = None
    kv_pool_bytes: int | None = None
    control_socket: Path | None = None
    cores: tuple[int, ...] = ()
    queue_limit: int = 256
    log_level: str = "info"
