"""Who gets KV blocks: growth of decoding sequences first, then admission in order of priority.

Deadlock-free: the highest priority among the sequences that hold blocks always gets one, if need be from a lower one,
and admission at the front refuses what could never fit the pool alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelane.engine.scheduling.plan import Decoding, Prefilling, Queued, State


@dataclass(frozen=True, slots=True)
class Allotment:
    """`decode` may take its step; `preempt` gives its blocks back; `admit` gets blocks for all its tokens."""

    decode: tuple[Decoding, ...]
    preempt: tuple[str, ...]
    admit: tuple[Queued, ...]


def allot(state: State, *, decode_idle: bool, max_running: int) -> Allotment:
    """Divide the free blocks.

    A step that finds no block free pre-empts strictly lower priorities, newest first, but none that is in flight: its
    blocks are being written. Who still lacks one sits this step out.
    """
    free = state.pool.free_blocks
    in_flight = state.flight.ids
    holders: list[Decoding | Prefilling] = sorted((*state.decoding, *state.prefilling), key=lambda s: s.priority)
    victims = [s for s in holders if s.id not in in_flight and not (state.paused and _in_pass(state, s.id))]
    preempted: dict[str, None] = {}
    stepping: list[Decoding] = []
    for sequence in state.decoding if decode_idle else ():
        if sequence.id in preempted:
            continue
        needed = state.pool.blocks_for(sequence.context + 1) - sequence.blocks
        while needed > free and victims and victims[-1].priority > sequence.priority:
            victim = victims.pop()
            preempted[victim.id] = None
            free += _held(state, victim)
        if needed <= free:
            free -= needed
            stepping.append(sequence)
    admit = () if preempted else _admit(state, free, max_running - len(holders))
    return Allotment(tuple(stepping), tuple(preempted), admit)


def _admit(state: State, free: int, places: int) -> tuple[Queued, ...]:
    """The head of the queue, as far as blocks reach: no one overtakes, so no one starves.

    One block for each decoding sequence stays free, or the newcomers would be pre-empted at once.
    """
    free -= len(state.decoding)
    admitted: list[Queued] = []
    for queued in state.queued[: max(0, places)]:
        needed = state.pool.blocks_for(queued.tokens + 1)
        if needed > free:
            break
        free -= needed
        admitted.append(queued)
    return tuple(admitted)


def _held(state: State, sequence: Decoding | Prefilling) -> int:
    return sequence.blocks if isinstance(sequence, Decoding) else state.pool.blocks_for(sequence.tokens + 1)


def _in_pass(state: State, sequence_id: str) -> bool:
    return state.paused is not None and any(span.id == sequence_id for span in state.paused.spans)
