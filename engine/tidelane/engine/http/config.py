"""How a front is started. Standard library only: the core imports this to spawn one, and needs no web server for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

EX_CONFIG = 78  # the front's exit code when it can never run as asked; the core passes it on


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the front itself. What the engine can hold is the loop's to say."""

    body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    open_calls: int = 2048
    # Open sockets, idle ones included; fewer where the process may not open so many files.
    connections: int = 4096
    # How long a client may take to send the head of a request, from its connection or the head's first byte on.
    head_timeout_s: float = 30.0
    # Tokens of a stream that wait for its reader, beyond what the sockets hold; then the stream ends with an error.
    unread_tokens: int = 2048
    # A peer that takes nothing for so long, or is no longer there, is cut off by the kernel.
    stall_s: float = 60.0
    heartbeat_age_s: float = 2.0
    # With work at hand and no step for so long, the loop counts as stuck. On a CPU, a slice of a prompt takes seconds.
    step_age_s: float = 30.0
    # Shorter texts are tokenised where they are: handing them to a thread takes longer.
    inline_chars: int = 4096


@dataclass(frozen=True, slots=True)
class FrontConfig:
    channel_path: str
    host: str
    port: int
    lifeline_fd: int  # read end of a pipe whose write end only the core holds
    served_name: str
    limits: Limits = field(default_factory=Limits)
    log_level: str = "info"

    def argv(self) -> list[str]:
        """The command that runs this front; pass `lifeline_fd` on to it (`pass_fds`)."""
        return [
            sys.executable, "-m", "tidelane.engine.http",
            "--channel", self.channel_path, "--host", self.host, "--port", str(self.port),
            "--lifeline-fd", str(self.lifeline_fd), "--served-name", self.served_name, "--log-level", self.log_level,
        ]  # fmt: skip
