"""A loop without a model, on the real channel: what it says is scripted, when it says it is the test's to decide.

It keeps the contract of `tests/engine/loop_contract.py`, which the real loop is held to as well.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidelane.engine.channel import (
    Abort,
    Accepted,
    Decisions,
    DecisionsWanted,
    Facts,
    FrontFailed,
    FrontReady,
    Heartbeat,
    LoggedDecision,
    RefusalReason,
    Refused,
    ToFront,
    Tokens,
    ToLoop,
    loop_end,
)
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.request import FinishReason, NewToken, Request, TokenLogprob
from tidelane.engine.scheduling.plan import Decision
from tidelane.engine.slo import Slo, Timeline

PATIENCE_S = 20.0  # how long a test waits for what must happen before it fails


@dataclass(frozen=True)
class Script:
    """How one request is answered. `tokens` None: as many as it asks for, made up from its prompt.

    `per_message` tokens go into one message. `ends_with` is the finish of the last one; None: STOP if the tokens end
    with one of the request's stop tokens, else LENGTH.
    """

    tokens: Sequence[int] | None = None
    refusal: Refused | None = None
    per_message: int = 1
    ends_with: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    logprob: float = -0.5


@dataclass
class _Running:
    request: Request
    script: Script
    tokens: list[int]
    made: int = 0
    messages: int = 0
    prefill_start_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0


@dataclass
class _State:
    """All that the test's thread and the loop's share; guarded by the condition."""

    scripts: deque[Script] = field(default_factory=deque)
    running: dict[str, _Running] = field(default_factory=dict)
    submitted: list[Request] = field(default_factory=list)
    aborted: list[Abort] = field(default_factory=list)
    front_ready: bool = False
    front_failed: str | None = None
    allowed_steps: float = math.inf
    steps: int = 0
    decisions: list[LoggedDecision] = field(default_factory=list)
    asked: list[DecisionsWanted] = field(default_factory=list)
    deaf: bool = False  # to questions about decisions
    beating: bool = True
    beat: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    stopping: bool = False


class FakeLoop:
    """Answers submissions in a thread of its own, one step at a time: a step gives each running request a message.

    Steps are `pace_s` apart at least.
    """

    def __init__(self, channel_path: str, facts: Facts, queue_limit: int = 1000, pace_s: float = 0.0) -> None:
        self.facts = facts
        self.queue_limit = queue_limit
        self._pace_s = pace_s
        self._path = channel_path
        self._state = _State()
        self._condition = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="fake-loop")

    # ---- the test's side -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes the channel, as a dying core does."""
        self._change(stopping=True)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        os.close(self._wake)

    def answer(self, *scripts: Script) -> None:
        """Answers the next submissions so, in order; further ones with the plain Script()."""
        with self._condition:
            self._state.scripts.extend(scripts)

    def hold(self) -> None:
        """No further step until `step` or `release`. Submissions are still accepted or refused."""
        self._change(allowed_steps=self._state.steps)

    def step(self, count: int = 1) -> None:
        """Allows `count` more steps, and waits until they are made."""
        with self._condition:
            goal = self._state.allowed_steps + count
        self._change(allowed_steps=goal)
        self.wait_until(lambda state: state.steps >= goal or not state.running)

    def release(self) -> None:
        self._change(allowed_steps=math.inf)

    def set_beat(self, *, beating: bool = True, draining: bool = False, **fields: Any) -> None:
        """What heartbeats say from now on, or that there are none."""
        self._change(beating=beating, draining=draining, beat=fields)

    def ignore_questions(self) -> None:
        """Leaves questions about decisions unanswered, as a loop that is stuck does."""
        self._change(deaf=True)

    @property
    def asked(self) -> list[DecisionsWanted]:
        with self._condition:
            return list(self._state.asked)

    def reset(self) -> None:
        """Back to the start, for the next test; what runs is forgotten."""
        with self._condition:
            self._state = _State(steps=self._state.steps)
        self._notify()

    @property
    def submitted(self) -> list[Request]:
        with self._condition:
            return list(self._state.submitted)

    @property
    def aborted(self) -> list[Abort]:
        with self._condition:
            return list(self._state.aborted)

    @property
    def front_failed(self) -> str | None:
        """Why the front gave up."""
        with self._condition:
            return self._state.front_failed

    @property
    def running(self) -> list[str]:
        with self._condition:
            return list(self._state.running)

    def wait_until(self, true: Callable[[_State], bool]) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: true(self._state), PATIENCE_S), "the loop never came to that state"

    def wait_for_submissions(self, count: int) -> list[Request]:
        self.wait_until(lambda state: len(state.submitted) >= count)
        return self.submitted

    def wait_for_aborts(self, count: int) -> list[Abort]:
        self.wait_until(lambda state: len(state.aborted) >= count)
        return self.aborted

    def _change(self, **fields: Any) -> None:
        with self._condition:
            for name, value in fields.items():
                setattr(self._state, name, value)
        self._notify()

    def _notify(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ---- the loop's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        endpoint = loop_end(self._path)
        self._send = endpoint.send
        poll = select.poll()
        poll.register(endpoint.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        endpoint.send(self.facts)
        next_beat_s = time.monotonic()
        while True:
            while (message := endpoint.receive(0)) is not None:
                with self._condition:
                    self._take(message)
                    self._condition.notify_all()
            with self._condition:
                if self._state.stopping:
                    break
                stepped = self._step()
                self._condition.notify_all()
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + 0.25
                    if self._state.beating:
                        endpoint.send(self._heartbeat())
            poll.poll(1000 * (self._pace_s if stepped else max(0.0, next_beat_s - time.monotonic())))
            if not stepped:
                self._clear_wake()
        endpoint.close()

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _take(self, message: ToLoop) -> None:
        state = self._state
        if isinstance(message, FrontReady):
            state.front_ready = True
            return
        if isinstance(message, FrontFailed):
            state.front_failed = message.reason
            return
        if isinstance(message, Abort):
            state.aborted.append(message)
            state.running.pop(message.request_id, None)
            return
        if isinstance(message, DecisionsWanted):
            state.asked.append(message)
            if not state.deaf:
                self._send(Decisions(message.number, tuple(state.decisions[-message.limit :])))
            return
        request = message.request
        state.submitted.append(request)
        script = state.scripts.popleft() if state.scripts else Script()
        refusal = script.refusal or self._refusal(request)
        if refusal is not None:
            self._send(msgspec.structs.replace(refusal, request_id=request.id))
            return
        self._send(Accepted(request.id))
        tokens = list(self._made_up(request) if script.tokens is None else script.tokens)
        state.running[request.id] = _Running(request, script, tokens)

    def _refusal(self, request: Request) -> Refused | None:
        if self._state.draining:
            return Refused(request.id, RefusalReason.DRAINING, "the engine drains")
        if len(request.prompt) + request.max_new_tokens > self.facts.kv_pool_tokens:
            return Refused(request.id, RefusalReason.NEVER_FITS, "larger than the whole pool")
        if len(self._state.running) >= self.queue_limit:
            return Refused(request.id, RefusalReason.QUEUE_FULL, "the queue is full", retry_after_s=1.5)
        return None

    def _made_up(self, request: Request) -> list[int]:
        """Differs by prompt and by seed where sampling, like a model's; never a stop token of the model's."""
        seed = request.sampling.seed if request.sampling.temperature else 0
        start = sum(request.prompt) + seed
        tokens: list[int] = []
        for position in range(request.max_new_tokens):
            tokens.append((start * 31 + position * 7) % 90 + 10)
            if tokens[-1] in request.stop_token_ids:
                break
        return tokens

    def _step(self) -> bool:
        state = self._state
        if not state.running or state.steps >= state.allowed_steps:
            return False
        state.steps += 1
        state.decisions.append(self._decision())
        for running in list(state.running.values()):
            message = self._next(running)
            self._send(message)
            if message.finish is not None:
                del state.running[running.request.id]
        return True

    def _decision(self) -> LoggedDecision:
        running = len(self._state.running)
        return LoggedDecision(
            time_s=time.monotonic(),
            why=Decision("scripted", running, 0, budget_s=0.05, step_s=0.04),
            partition=Partition(1, 1),
            fused=False,
            decode_sequences=running,
            prefill_tokens=0,
            layers=None,
            admitted=0,
            preempted=0,
        )

    def _next(self, running: _Running) -> Tokens:
        request, script = running.request, running.script
        now_s = time.monotonic()
        first = running.messages == 0
        if first:
            running.prefill_start_s = now_s
        new = running.tokens[running.made : running.made + script.per_message]
        if new and not running.made:
            running.first_s = now_s
        elif new:
            running.longest_gap_s = max(running.longest_gap_s, now_s - running.last_s)
        running.last_s = now_s
        running.made += len(new)
        running.messages += 1
        finish = self._finish(running) if running.made >= len(running.tokens) else None
        wants_prompt = first and request.sampling.prompt_logprobs is not None
        return Tokens(
            request.id,
            tuple(NewToken(token, self._logprob(token, request.sampling.logprobs, script)) for token in new),
            now_s,
            cached_tokens=script.cached_tokens,
            prompt_logprobs=self._prompt_logprobs(request, script) if wants_prompt else None,
            prefill_start_s=running.prefill_start_s if first else None,
            finish=finish,
            timeline=self._timeline(running) if finish is not None and running.made else None,
            error=script.error,
        )

    def _finish(self, running: _Running) -> FinishReason:
        if running.script.ends_with is not None:
            return running.script.ends_with
        stopped = running.tokens and running.tokens[-1] in running.request.stop_token_ids
        return FinishReason.STOP if stopped else FinishReason.LENGTH

    def _logprob(self, token: int, alternatives: int | None, script: Script) -> TokenLogprob | None:
        if alternatives is None:
            return None
        top = tuple((token + rank, script.logprob - rank) for rank in range(alternatives))
        return TokenLogprob(token, script.logprob, top)

    def _prompt_logprobs(self, request: Request, script: Script) -> tuple[TokenLogprob | None, ...]:
        wanted = request.sampling.prompt_logprobs
        return (None, *(self._logprob(token, wanted, script) for token in request.prompt[1:]))

    def _timeline(self, running: _Running) -> Timeline:
        return Timeline(
            arrival_s=running.request.arrival_s,
            prefill_start_s=running.prefill_start_s,
            first_token_s=running.first_s,
            last_token_s=running.last_s,
            input_tokens=len(running.request.prompt),
            output_tokens=running.made,
            longest_gap_s=running.longest_gap_s,
        )

    def _heartbeat(self) -> ToFront:
        state = self._state
        beat = Heartbeat(
            time_s=time.monotonic(),
            running=len(state.running),
            waiting=0,
            kv_blocks_total=100,
            kv_blocks_free=100 - min(100, len(state.running)),
            kv_blocks_idle=0,
            kv_evictions=0,
            preemptions=0,
            lane_moves=3,
            compute_units=2,
            decode_units=1,
            prefill_units=1,
            busy_s={"split": 1.5, "idle": 2.5},
            steps=state.steps,
            slo=Slo(ttft_s=0.2, tpot_s=0.05, ttft_per_1k_input_tokens_s=0.1),
            mode="lanes",
            draining=state.draining,
        )
        return msgspec.structs.replace(beat, **state.beat)
