"""Who gets KV blocks: decoding sequences first, for their next token; then prompts, as a pass takes them in.

Deadlock-free: the highest priority among the sequences that hold blocks always gets one, if need be from a lower one,
and admission at the front refuses what could never fit the pool alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from tidelane.engine.scheduling.plan import Decoding, Prefilling, Queued, Span, State, Waiting


class Growth(msgspec.Struct, frozen=True):
    """`decode` may take its step; `preempt` gives its blocks back; `free_blocks` are left for prompts."""

    decode: tuple[Decoding, ...]
    preempt: tuple[str, ...]
    free_blocks: int


def grow(state: State) -> Growth:
    """Give each decoding sequence the block that its next token may need; none while a step is in flight.

    A step that finds no block free pre-empts strictly lower priorities, newest first, but none that is in flight: its
    blocks are being written. Who still lacks one sits this step out.
    """
    free = state.pool.free_blocks
    if state.flight.decode is not None:
        return Growth((), (), free)
    stepping: list[Decoding] = []
    preempted: dict[str, None] = {}
    victims: list[Decoding | Prefilling] | None = None
    block_tokens = state.pool.block_tokens
    for sequence in state.decoding:
        if sequence.id in preempted:
            continue
        if sequence.context < sequence.blocks * block_tokens:
            stepping.append(sequence)
            continue
        if free < 1 and victims is None:
            victims = _victims(state)
        while free < 1 and victims and victims[-1].priority > sequence.priority:
            victim = victims.pop()
            preempted[victim.id] = None
            free += _held(state, victim)
        if free >= 1:
            free -= 1
            stepping.append(sequence)
    if preempted:
        stepping = [s for s in stepping if s.id not in preempted]
        free = 0  # what was just taken away is not for newcomers
    return Growth(tuple(stepping), tuple(preempted), free)


def _victims(state: State) -> list[Decoding | Prefilling]:
    """Who holds blocks that would get free, and that nobody is writing; lowest priority last."""
    busy = set(state.flight.ids)
    if state.paused is not None:
        busy.update(span.id for span in state.paused.spans)
    holders: list[Decoding | Prefilling] = [*state.decoding, *state.prefilling]
    return sorted((s for s in holders if s.id not in busy and _held(state, s)), key=lambda s: s.priority)


def _held(state: State, sequence: Decoding | Prefilling) -> int:
    """Blocks that get free with it."""
    blocks = sequence.blocks if isinstance(sequence, Decoding) else state.pool.blocks_for(sequence.tokens + 1)
    return blocks - state.pool.shared.get(sequence.id, 0)


class Filling(msgspec.Struct, frozen=True):
    """One pass: the parts of prompts in it, and which of them get their blocks now."""

    spans: tuple[Span, ...] = ()
    admit: tuple[str, ...] = ()


class Room(Protocol):
    """What a pass may hold besides a number of tokens."""

    def most_tokens(self, start: int, most: int) -> int:
        """How many more tokens, up to `most`, of a prompt of which `start` are done."""
        ...

    def take(self, span: Span) -> None: ...


def fill(
    state: State,
    growth: Growth,
    candidates: Iterable[Waiting],
    max_tokens: int,
    *,
    max_running: int,
    cut: bool = True,
    room: Room | None = None,
) -> Filling:
    """Take `candidates` in their order into a pass of `max_tokens` tokens, as far as blocks, places and `room` reach.

    No one overtakes one that lacks blocks, except those that have theirs, so no one starves. The last prompt is cut to
    fit; without `cut` only if it stands first, and otherwise it waits for a pass of its own. One block for each
    decoding sequence stays free, or the newcomers would be pre-empted at once.
    """
    free = growth.free_blocks - len(state.decoding)
    places = max_running - len(state.decoding) - len(state.prefilling)
    spans: list[Span] = []
    admit: list[str] = []
    tokens_left = max_tokens
    full = False
    for sequence in candidates:
        if sequence.id in growth.preempt:
            continue  # it has just lost what it had
        left = sequence.tokens - sequence.computed
        if tokens_left < 1 or (left > tokens_left and spans and not cut):
            break
        taken = min(left, tokens_left)
        if room is not None:
            # One token at least for the first of them, or nothing would ever go on.
            taken = max(room.most_tokens(sequence.computed, taken), 0 if spans else 1)
            if taken < 1:
                break
        if isinstance(sequence, Queued):
            needed = state.pool.blocks_for(sequence.tokens + 1) - sequence.shared_blocks
            full = full or needed > free or places < 1
            if full:
                continue
            free -= needed
            places -= 1
            admit.append(sequence.id)
        spans.append(Span(sequence.id, sequence.computed, sequence.computed + taken))
        tokens_left -= taken
        if room is not None:
            room.take(spans[-1])
    return Filling(tuple(spans), tuple(admit))
