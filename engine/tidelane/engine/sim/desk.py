"""The desk in virtual time: requests come from a list, and what the loop says becomes figures at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidelane.engine.channel import Abort, AboutRequest, RefusalReason, Refused, Submit, ToFront, Tokens
from tidelane.engine.execution.executor import Completion
from tidelane.engine.request import Request
from tidelane.engine.sim.gaps import GapHistogram
from tidelane.engine.sim.prefix import HashNames
from tidelane.engine.slo import Timeline

POLICY = "simulated"


@dataclass(frozen=True, slots=True)
class Ending:
    """How one request ended: with a timeline, or refused."""

    id: str
    timeline: Timeline | None
    refusal: RefusalReason | None = None


class RecordingDesk:
    """`open_tokens` are those, in and out, that requests under way ask for; `cached_tokens` those of all prompts that
    were found."""

    def __init__(self, names: HashNames) -> None:
        self.endings: list[Ending] = []
        self.gaps = GapHistogram()
        self.open_tokens = 0
        self.cached_tokens = 0
        self._names = names
        self._inbox: list[AboutRequest] = []
        self._asked: dict[str, int] = {}
        self._last_token_s: dict[str, float] = {}

    def submit(self, request: Request) -> None:
        self._inbox.append(Submit(request))
        self._asked[request.id] = tokens = len(request.prompt) + request.max_new_tokens
        self.open_tokens += tokens

    def abort(self, request_id: str) -> None:
        self._inbox.append(Abort(request_id))

    def wait(self) -> None:
        """The world moves the clock."""

    def messages(self) -> list[AboutRequest]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, messages: list[ToFront]) -> None:
        last_s = self._last_token_s
        add_gap = self.gaps.add
        for message in messages:
            if isinstance(message, Tokens):
                name, now_s = message.request_id, message.time_s
                self.cached_tokens += message.cached_tokens
                if name in last_s:
                    add_gap(now_s - last_s[name])
                if message.finish is None:
                    last_s[name] = now_s
                else:
                    last_s.pop(name, None)
                    self._end(Ending(name, message.timeline))
            elif isinstance(message, Refused):
                self._end(Ending(message.request_id, None, message.reason))

    def run_on(self, steps: Sequence[Completion]) -> None:
        """Each of these gave a token to each of the same sequences, one step right after the other."""
        first, decode = steps[0], steps[0].decode
        assert decode is not None
        for name in decode.ids:
            self.gaps.add(first.ended_s - self._last_token_s[name])
        for before, step in pairwise(steps):
            self.gaps.add(step.ended_s - before.ended_s, len(decode.ids))
        self._last_token_s.update(dict.fromkeys(decode.ids, steps[-1].ended_s))

    def policy(self) -> str:
        return POLICY

    def _end(self, ending: Ending) -> None:
        self._names.ended(ending.id)
        self.open_tokens -= self._asked.pop(ending.id)
        self.endings.append(ending)
