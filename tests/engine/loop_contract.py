"""What the HTTP front relies on, as tests that any loop must pass: the real one, and the fake of the front's tests.

A test module imports these tests (`from engine.loop_contract import *`) and gives a fixture `loop` of type
`LoopUnderTest`. The rules, each of which a test below names:

1.  Facts come before anything else, and heartbeats keep coming; both without being asked.
2.  A submission is answered by one `Accepted` or one `Refused`; after `Refused` nothing more comes of it.
3.  After `Accepted` come `Tokens`, the last of them, and only it, with `finish`; then nothing more.
4.  `max_new_tokens` tokens at most; with all of them made, finish is LENGTH.
5.  A stop token ends the sequence with STOP; it is in `new`, and counts.
6.  The first message carries `prefill_start_s`, and `prompt_logprobs` if asked for: one entry for each prompt token,
    None for the first. With `max_new_tokens` 0 it is also the last, has no `new`, no `timeline`, and finish LENGTH.
7.  Log-probabilities hold as many alternatives as asked for, the likeliest first; none unless asked.
8.  The last message has a timeline, in order and consistent with the messages, unless no token was made.
9.  After an abort nothing comes of the request but what was under way; others go on; unknown ids do no harm; the KV
    blocks are free again.
10. What can never fit the pool is refused with NEVER_FITS and a reason; beyond the queue's bound with QUEUE_FULL and a
    time to come again.
11. The same seed gives the same tokens.
12. `cached_tokens` never exceeds the prompt less one token: the last one is always computed.
13. The heartbeat's `steps` grows with every launch that ends, of prefill as of decode: a loop whose steps stand still
    while it has work is taken to be stuck.
14. Asked for decisions, it answers once, with the last ones, no more than asked for, and the newest last.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tidelane.engine.channel import (
    Abort,
    Accepted,
    Decisions,
    DecisionsWanted,
    Endpoint,
    Facts,
    Heartbeat,
    RefusalReason,
    Refused,
    Submit,
    ToFront,
    Tokens,
    ToLoop,
)
from tidelane.engine.request import FinishReason, Request, Sampling

PATIENCE_S = 60.0

__all__ = [
    "LoopUnderTest",
    "test_a_full_queue_refuses_with_a_time_to_come_again",
    "test_a_prompt_alone_can_be_scored",
    "test_a_stop_token_ends_the_sequence",
    "test_aborted_requests_end_and_others_go_on",
    "test_decisions_are_told_when_asked_for",
    "test_each_submission_has_one_answer_and_one_end",
    "test_facts_come_first_and_heartbeats_keep_coming",
    "test_logprobs_as_asked",
    "test_prompt_logprobs_come_with_the_first_message",
    "test_the_same_seed_gives_the_same_tokens",
    "test_the_timeline_fits_the_messages",
    "test_what_never_fits_is_refused",
]


@dataclass
class LoopUnderTest:
    """A running loop, seen from the front's end of its channel. `queue_limit` is how many requests it lets wait."""

    endpoint: Endpoint[ToLoop, ToFront]
    queue_limit: int
    heard: list[ToFront] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def request(self, prompt: tuple[int, ...] = (11, 12, 13, 14), new: int = 4, **sampling: object) -> Request:
        chosen = replace(Sampling(seed=1, temperature=0.0), **sampling)  # type: ignore[arg-type]
        return Request(f"r{next(self._numbers)}", prompt, new, chosen, arrival_s=time.monotonic())

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.endpoint.send(Submit(request))

    def listen_until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            message = self.endpoint.receive(1.0)
            if message is not None:
                self.heard.append(message)
            assert time.monotonic() < deadline_s, f"never came; heard last: {self.heard[-3:]}"

    def about(self, request: Request) -> list[Accepted | Refused | Tokens]:
        return [
            message
            for message in self.heard
            if isinstance(message, Accepted | Refused | Tokens) and message.request_id == request.id
        ]

    def over(self, request: Request) -> bool:
        return any(
            isinstance(message, Refused) or (isinstance(message, Tokens) and message.finish is not None)
            for message in self.about(request)
        )

    def run(self, *requests: Request) -> list[list[Tokens]]:
        """Submits, waits until all ended, and returns each one's `Tokens`."""
        self.submit(*requests)
        self.listen_until(lambda: all(self.over(request) for request in requests))
        return [[message for message in self.about(request) if isinstance(message, Tokens)] for request in requests]

    def facts(self) -> Facts:
        self.listen_until(lambda: any(isinstance(message, Facts) for message in self.heard))
        return next(message for message in self.heard if isinstance(message, Facts))

    def last_beat(self) -> Heartbeat:
        """A heartbeat that was sent after everything heard so far."""
        count = len(self.heard)
        self.listen_until(lambda: any(isinstance(message, Heartbeat) for message in self.heard[count:]))
        return next(message for message in reversed(self.heard) if isinstance(message, Heartbeat))


def token_ids(messages: list[Tokens]) -> list[int]:
    return [new.token_id for message in messages for new in message.new]


def test_facts_come_first_and_heartbeats_keep_coming(loop: LoopUnderTest) -> None:
    facts = loop.facts()
    assert loop.heard[0] == facts
    assert facts.vocab_size > 0
    assert facts.max_context_tokens > 0
    assert facts.kv_pool_tokens > 0
    first, second = loop.last_beat(), loop.last_beat()
    assert first.time_s < second.time_s <= time.monotonic()
    assert not second.draining


def test_each_submission_has_one_answer_and_one_end(loop: LoopUnderTest) -> None:
    loop.facts()
    requests = [
        loop.request(new=new, prompt=tuple(range(10, 10 + length))) for new, length in [(1, 1), (3, 9), (6, 40)]
    ]
    loop.run(*requests)
    loop.last_beat()
    for request in requests:
        about = loop.about(request)
        assert [type(message) for message in about] == [Accepted] + [Tokens] * (len(about) - 1)
        tokens = [message for message in about if isinstance(message, Tokens)]
        finishes = [message.finish for message in tokens]
        assert finishes == [None] * (len(finishes) - 1) + [FinishReason.LENGTH]
        assert len(token_ids(tokens)) == request.max_new_tokens
        assert tokens[0].prefill_start_s is not None
        assert all(message.error is None and message.prompt_logprobs is None for message in tokens)
        assert 0 <= tokens[0].cached_tokens < len(request.prompt)


def test_a_stop_token_ends_the_sequence(loop: LoopUnderTest) -> None:
    loop.facts()
    (free,) = loop.run(loop.request(new=8))
    ids = token_ids(free)
    stop = ids[3]
    (stopped,) = loop.run(replace(loop.request(new=8), stop_token_ids=(stop,)))
    assert token_ids(stopped) == ids[: ids.index(stop) + 1]
    assert stopped[-1].finish is FinishReason.STOP
    assert stopped[-1].timeline is not None
    assert stopped[-1].timeline.output_tokens == ids.index(stop) + 1


def test_prompt_logprobs_come_with_the_first_message(loop: LoopUnderTest) -> None:
    loop.facts()
    request = loop.request(prompt=tuple(range(20, 29)), new=2, prompt_logprobs=2, logprobs=0)
    (messages,) = loop.run(request)
    report = messages[0].prompt_logprobs
    assert report is not None
    assert report[0] is None
    assert [entry.token_id for entry in report[1:] if entry is not None] == list(request.prompt[1:])
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in report[1:] if entry is not None)
    assert all(message.prompt_logprobs is None for message in messages[1:])


def test_a_prompt_alone_can_be_scored(loop: LoopUnderTest) -> None:
    loop.facts()
    request = loop.request(prompt=(20, 21, 22), new=0, prompt_logprobs=0)
    before = loop.last_beat()
    ((message,),) = loop.run(request)
    assert loop.last_beat().steps > before.steps, "prefill is progress too"
    assert (message.new, message.finish, message.timeline) == ((), FinishReason.LENGTH, None)
    assert message.prompt_logprobs is not None
    assert len(message.prompt_logprobs) == 3


def test_logprobs_as_asked(loop: LoopUnderTest) -> None:
    loop.facts()
    plain, own, three = loop.run(loop.request(), loop.request(logprobs=0), loop.request(logprobs=3))
    assert all(new.logprob is None for message in plain for new in message.new)
    for messages, alternatives in ((own, 0), (three, 3)):
        for new in (new for message in messages for new in message.new):
            assert new.logprob is not None
            assert new.logprob.token_id == new.token_id
            assert len(new.logprob.top) == alternatives
            assert sorted(new.logprob.top, key=lambda pair: -pair[1]) == list(new.logprob.top)


def test_the_timeline_fits_the_messages(loop: LoopUnderTest) -> None:
    loop.facts()
    request = loop.request(new=5)
    (messages,) = loop.run(request)
    timeline = messages[-1].timeline
    assert timeline is not None
    assert (timeline.input_tokens, timeline.output_tokens) == (len(request.prompt), 5)
    assert timeline.arrival_s == request.arrival_s <= timeline.prefill_start_s <= timeline.first_token_s
    assert timeline.first_token_s <= timeline.last_token_s <= time.monotonic()
    assert messages[0].prefill_start_s == timeline.prefill_start_s
    times_s = [message.time_s for message in messages]
    assert times_s == sorted(times_s)
    assert timeline.first_token_s <= times_s[0]
    assert timeline.longest_gap_s <= timeline.last_token_s - timeline.first_token_s


def test_aborted_requests_end_and_others_go_on(loop: LoopUnderTest) -> None:
    facts = loop.facts()
    before = loop.last_beat()
    long = min(facts.max_context_tokens - 8, 400)
    # One is aborted before anything, one after its first token; two of them share a message batch with one that stays.
    early, running, stays = loop.request(new=long), loop.request(new=long), loop.request(new=12)
    loop.submit(early)
    loop.endpoint.send(Abort(early.id))
    loop.endpoint.send(Abort("never-heard-of"))
    loop.submit(running, stays)
    loop.listen_until(lambda: any(isinstance(message, Tokens) for message in loop.about(running)))
    loop.endpoint.send(Abort(running.id, FinishReason.STOP))
    loop.endpoint.send(Abort(running.id))
    (after,) = loop.run(loop.request(new=3))
    loop.listen_until(lambda: loop.over(stays))
    assert len(token_ids(after)) == 3
    assert len(token_ids([message for message in loop.about(stays) if isinstance(message, Tokens)])) == 12
    count = len(loop.heard)
    loop.listen_until(lambda: loop.last_beat().running == 0)
    for aborted in (early, running):
        assert not loop.over(aborted), "an aborted request got an ending"
        late = [message for message in loop.heard[count:] if message in loop.about(aborted)]
        assert late == []
    beat = loop.last_beat()
    assert (beat.running, beat.waiting) == (0, 0)
    assert beat.kv_blocks_free == before.kv_blocks_free
    assert beat.steps > before.steps


def test_what_never_fits_is_refused(loop: LoopUnderTest) -> None:
    facts = loop.facts()
    request = loop.request(new=facts.kv_pool_tokens)
    assert loop.run(request) == [[]]
    (refused,) = loop.about(request)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.NEVER_FITS
    assert refused.message
    assert refused.retry_after_s is None


def test_a_full_queue_refuses_with_a_time_to_come_again(loop: LoopUnderTest) -> None:
    loop.facts()
    # More than may run and wait together, whatever the loop runs at once.
    requests = [loop.request(new=20) for _ in range(loop.queue_limit + 200)]
    loop.run(*requests)
    kinds: dict[str, int] = defaultdict(int)
    for request in requests:
        first = loop.about(request)[0]
        kinds[type(first).__name__] += 1
        if isinstance(first, Refused):
            assert first.reason is RefusalReason.QUEUE_FULL
            assert first.retry_after_s is not None
            assert first.retry_after_s > 0
            assert first.message
            assert loop.about(request) == [first]
    assert kinds["Refused"] > 0
    assert kinds["Accepted"] >= loop.queue_limit


def test_the_same_seed_gives_the_same_tokens(loop: LoopUnderTest) -> None:
    loop.facts()
    one, same, other = loop.run(
        *(loop.request(new=8, temperature=1.0, seed=seed) for seed in (5, 5, 6)),
    )
    assert token_ids(one) == token_ids(same)
    assert token_ids(one) != token_ids(other)


def test_decisions_are_told_when_asked_for(loop: LoopUnderTest) -> None:
    def ask(number: int, limit: int) -> Decisions:
        loop.endpoint.send(DecisionsWanted(number, limit))
        loop.listen_until(lambda: any(isinstance(message, Decisions) for message in loop.heard))
        (answer,) = [message for message in loop.heard if isinstance(message, Decisions)]
        loop.heard.remove(answer)
        return answer

    loop.facts()
    begun_s = time.monotonic()
    loop.run(loop.request(new=5))
    every = ask(7, 1000)
    assert every.number == 7
    ours = [each for each in every.decisions if each.time_s >= begun_s]
    assert len(ours) >= 5
    times_s = [each.time_s for each in every.decisions]
    assert times_s == sorted(times_s)
    assert sum(each.decode_sequences for each in ours) >= 4
    for each in ours:
        assert each.why.reason
        assert each.decode_sequences + each.prefill_tokens > 0
        assert each.partition.decode_units > 0
    assert ask(8, 2) == Decisions(8, every.decisions[-2:])
