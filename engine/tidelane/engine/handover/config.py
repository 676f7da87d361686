"""How a prefill side is started."""

from __future__ import annotations

import sys

import msgspec


class PrefillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`memory_fd` is the decode side's pool of `blocks` blocks; `folder`, `dtype` and the rest say what it holds."""

    folder: str
    dtype: str
    max_context_tokens: int | None
    cores: tuple[int, ...]
    blocks: int
    memory_fd: int
    log_level: str = "info"

    def argv(self, link_fd: int, decode_pid: int) -> list[str]:
        """The command that runs a prefill side; pass it `memory_fd` and `link_fd`, its end of a socket pair."""
        return [
            sys.executable, "-m", "tidelane.engine.handover",
            "--config", msgspec.json.encode(self).decode(), "--link-fd", str(link_fd), "--decode-pid", str(decode_pid),
        ]  # fmt: skip
