"""Messages between the HTTP front and the engine loop, which are two processes, and the sockets that carry them.

The front tokenises, holds back stop strings and streams; the loop knows token ids only. Everything the loop says about
a request is one of `Accepted`, `Refused`, `Tokens` (the last of them with `finish`) - so each request gets exactly one
ending, whatever happens. Transport: ZeroMQ sockets on Unix paths, whose I/O threads need no GIL.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tidelane.engine.lanes.partition import Partition
from tidelane.engine.load import Outlook
from tidelane.engine.request import FinishReason, NewToken, Request, TokenLogprob
from tidelane.engine.scheduling.plan import Decision
from tidelane.engine.slo import Slo, Timeline

# ---- front -> loop -------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop the request and free its KV. No `Tokens` follows for it, in whatever state it was. Unknown ids are fine.

    `reason` is STOP when the front saw a stop string: the request then ended well, and counts as finished.
    """

    request_id: str
    reason: FinishReason = FinishReason.ABORTED


class DecisionsWanted(msgspec.Struct, frozen=True, tag=True):
    """Answered by one `Decisions` with the same `number`, which holds the last `limit` of them."""

    number: int
    limit: int


class FrontReady(msgspec.Struct, frozen=True, tag=True):
    """The front has what it needs of the model and answers requests; sent once, after `Facts`."""


class FrontFailed(msgspec.Struct, frozen=True, tag=True):
    """The front can never serve this model, and ends; the loop passes `reason` on to whoever started it."""

    reason: str


AboutRequest = Submit | Abort
ForLoop = AboutRequest | DecisionsWanted
ToLoop = ForLoop | FrontReady | FrontFailed


# ---- loop -> front -------------------------------------------------------------------------------------------------


class RefusalReason(StrEnum):
    QUEUE_FULL = "queue_full"  # 429, retry-after
    NEVER_FITS = "never_fits"  # 400: prompt + max_new_tokens exceed the whole KV pool
    DRAINING = "draining"  # 503
    WOULD_BE_LATE = "would_be_late"  # 429, retry-after: its first token would miss its target, by prediction


class Accepted(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one request, made known at `time_s` (CLOCK_MONOTONIC).

    `prompt_logprobs` comes once, with the first message, if asked for: one entry per prompt token, None for the first.
    So does `prefill_start_s`: a request that a stop string ends gets no `timeline` from the loop.
    `finish` is set on the last message only; `timeline` with it unless no token was made; `error` says why when
    `finish` is ERROR.
    """

    request_id: str
    new: tuple[NewToken, ...]
    time_s: float
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prefill_start_s: float | None = None
    finish: FinishReason | None = None
    timeline: Timeline | None = None
    error: str | None = None


class LoggedRefusal(msgspec.Struct, frozen=True):
    """A request of `tokens` that was to wait `ttft_s` for its first token, by prediction, and had `target_s`."""

    tokens: int
    ttft_s: float
    target_s: float
    retry_after_s: float


class LoggedDecision(msgspec.Struct, frozen=True):
    """What was decided at `time_s` (CLOCK_MONOTONIC), and why; in sizes, as nobody needs to know whose requests.

    What is launched: a step of `decode_sequences`, and `prefill_tokens` through `layers` (from, to before), together
    in one pass if `fused`. `admitted` and `preempted` count requests; `refused` are those that would have been late.
    """

    time_s: float
    why: Decision
    partition: Partition
    fused: bool
    decode_sequences: int
    prefill_tokens: int
    layers: tuple[int, int] | None
    admitted: int
    preempted: int
    refused: tuple[LoggedRefusal, ...] = ()


class Decisions(msgspec.Struct, frozen=True, tag=True):
    """The answer to `DecisionsWanted`, the newest last."""

    number: int
    decisions: tuple[LoggedDecision, ...]


class Facts(msgspec.Struct, frozen=True, tag=True):
    """What the front must know of the engine; sent once, when the engine is warm."""

    served_name: str
    model_folder: str  # tokenizer and chat template are read from here
    max_context_tokens: int
    kv_pool_tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    queue_limit: int  # requests that may wait at once: a call of more could never be taken
    kv_stream_tokens: int = 0  # the longest context that streams from host memory; 0: none does


class Moved(msgspec.Struct, frozen=True):
    """One way to or from a tier, since the start: what came through, seconds during which anything was on its way, and
    moves that did not end well."""

    blocks: int
    bytes: int
    seconds: float
    failed_moves: int


class Tier(msgspec.Struct, frozen=True):
    """Blocks of KV in a tier below the device; evictions are counted since the start."""

    total: int
    free: int
    evictions: int
    stored: Moved
    loaded: Moved
    pinned: int = 0  # by contexts that stream; neither free nor to be had


class Ahead(msgspec.Struct, frozen=True):
    """Blocks that came to a tier for prompts that might follow, since the start; how many a prompt found, and how many
    none did. Of the rest it is not known yet."""

    blocks: int
    useful: int
    wasted: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every 250 ms and after an objective changed; `/ready` fails when it stops coming."""

    time_s: float
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int  # that can be had
    kv_blocks_idle: int  # those of them that hold what a prompt may begin with
    kv_evictions: int  # idle blocks that made room for others
    preemptions: int
    lane_moves: int
    compute_units: int
    decode_units: int  # as last split; 0: never split yet
    prefill_units: int
    busy_s: dict[str, float]  # seconds since start by kind: split, decode_alone, prefill_alone, mixed, idle
    # Launches that ended, decode steps and prefill slices alike: to stand still with work at hand is to be stuck.
    steps: int
    slo: Slo
    mode: str
    draining: bool = False
    kv_tiers: dict[str, Tier] = {}  # host, disk
    kv_prefetched: dict[str, Ahead] = {}  # device, host; where KV may be below the device
    # Contexts larger than the device's pool: those that compute, those that wait for that, and what was read of them.
    streams_running: int = 0
    streams_waiting: int = 0
    streamed_bytes: int = 0
    lane_moves_to: dict[str, int] = {}  # by the border moved to: "1+3" (decode and prefill units), "whole"
    outlook: Outlook = Outlook()


ToFront = Accepted | Refused | Tokens | Decisions | Facts | Heartbeat


Out = TypeVar("Out")
In = TypeVar("In")


class Endpoint(Generic[Out, In]):
    """One end of the channel. `send` never blocks; `receive` waits, and returns None on time-out.

    The ends may start in either order: what is sent before the other end exists is kept for it. Not thread-safe: each
    end belongs to one thread (or one asyncio loop, through `fileno`).
    """

    def __init__(self, outgoing_path: str, incoming_path: str, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        # Two one-way sockets, since only the connecting side of a ZeroMQ socket can send to a peer not yet there.
        self._in = _socket(zmq.PULL)
        self._in.bind(f"ipc://{incoming_path}")
        self._out = _socket(zmq.PUSH)
        self._out.connect(f"ipc://{outgoing_path}")

    def send(self, message: Out) -> None:
        self._out.send(self._encoder.encode(message), flags=zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> In | None:
        if not self._in.poll(int(timeout_s * 1000)):
            return None
        return self._decoder.decode(self._in.recv())

    @property
    def incoming(self) -> zmq.Socket[bytes]:
        """The receiving socket, for a `zmq.Poller` (which does not mind edges)."""
        return self._in

    def fileno(self) -> int:
        """A descriptor that becomes readable when messages come. Edge-triggered: after each wake-up, call `receive(0)`
        until it returns None, or the next wake-up may never come."""
        return int(self._in.getsockopt(zmq.FD))

    def close(self) -> None:
        self._in.close(linger=0)
        self._out.close(linger=200)


def loop_end(path: str) -> Endpoint[ToFront, ToLoop]:
    """The loop's end of the channel at `path`, which begins the names of its Unix sockets."""
    return Endpoint(f"{path}.to-front", f"{path}.to-loop", ToLoop)


def front_end(path: str) -> Endpoint[ToLoop, ToFront]:
    """The front's end."""
    return Endpoint(f"{path}.to-loop", f"{path}.to-front", ToFront)


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    # No high-water mark: a slow reader must not make the loop drop or block; the admission bound limits what is queued.
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    return socket
