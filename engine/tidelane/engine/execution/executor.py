"""The seam below the loop: an executor launches plans and says what has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tidelane.engine.request import NewToken, TokenLogprob
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice


class Sampled(msgspec.Struct, frozen=True):
    """What one sequence got out of a launch."""

    id: str
    token: NewToken | None  # None: no token was due (part of a prompt, or none wanted)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of this launch's part of the prompt
    failed: bool = False  # a token was due, but the model's output was not a number


class Completion(msgspec.Struct, frozen=True):
    """The decode step, the prefill slice, or (fused) both, that ended.

    `units` are the compute units it ran on. `failure` says why nothing came of it; its sequences cannot go on, unless
    KV did not come that some of them waited for.
    """

    decode: DecodeBatch | None
    prefill: PrefillSlice | None
    units: int
    started_s: float
    ended_s: float
    sampled: tuple[Sampled, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The process that prefills has ended, where it is one of its own. No prefill can be launched for the time being.

    `prefill`, the slice that it was at, will not complete, and what it had of prompts that are not done yet is gone.
    Nothing writes to their blocks any more.
    """

    prefill: PrefillSlice | None


@dataclass(frozen=True, slots=True)
class PrefillBack:
    """Prefill can be launched."""


Event = Completion | PrefillLost | PrefillBack


class Executor(Protocol):
    """CUDA lanes, CPU lanes, two processes, virtual time.

    Between launch and completion the executor reads the launched sequences, and the caller leaves their tokens, blocks
    and `computed` alone.
    """

    def launch(self, plan: Plan) -> None:
        """Start the plan's decode step and prefill slice. Never blocks."""
        ...

    def poll(self) -> Sequence[Event]:
        """What has ended since the last call. Never blocks."""
        ...

    def forget(self, job: int) -> None:
        """Drop the activations of a prefill pass that will not go on."""
        ...

    def close(self) -> None: ...
