"""Who waits for a place, in the orders that schedulers ask for, and how much of each prompt is in the KV cache."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Protocol

from tidelane.engine.estimation.passes import PassWork, prefill_work
from tidelane.engine.kv.cache import KVCache
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import Asker
from tidelane.engine.prefetch import LookAhead
from tidelane.engine.request import Request
from tidelane.engine.scheduling.plan import Queued
from tidelane.engine.sequence import Sequence

_PRIORITY = attrgetter("priority")
# From a request's arrival on. A healthy disk has given what a prompt needs long before; one that hangs never will.
DISK_PATIENCE_S = 2.0
# Of prompts that a fetch would not pay for, one in so many is fetched all the same: a disk may have become faster.
TRIED_ANYWAY = 16


def _due(job: Queued) -> tuple[int, float, str]:
    return (job.priority[0], job.ttft_due_s, job.id)


class BlockNames(Protocol):
    """What the blocks of a sequence are called, so that those with equal contents are known to be."""

    def extend(self, keys: list[Key], request: Request, tokens: list[int], blocks: int) -> None:
        """Append to `keys`, those of the first whole blocks of `tokens`, until there are `blocks`; or fewer, where some
        have no name."""
        ...

    def lasting(self, keys: list[Key], request: Request) -> list[Key]:
        """Those of a prompt's names that a prompt which goes on from it has, too."""
        ...


class WaitingLine:
    """Without `names` nothing is looked for in the cache. `prefill_s` predicts a pass on the whole device, and
    `fetch_s` the fetch of so many blocks from the disk. `ahead` hears of each prompt."""

    def __init__(
        self,
        cache: KVCache,
        names: BlockNames | None,
        block_tokens: int,
        prefill_s: Callable[[PassWork], float],
        fetch_s: Callable[[int], float],
        ahead: LookAhead,
    ) -> None:
        self._cache = cache
        self._names = names
        self._block_tokens = block_tokens
        self._prefill_s = prefill_s
        self._fetch_s = fetch_s
        self._ahead = ahead
        self._not_worth_it = 0
        self._sequences: dict[str, Sequence] = {}
        # Who waits for KV from the disk, and for which blocks of it, before anyone sees that it waits.
        self._coming: dict[str, set[Key]] = {}
        self._wanting: dict[Key, set[str]] = {}
        self._by_priority: list[Queued] = []
        self._by_due: list[Queued] = []  # by tier and deadline

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Queued | None:
        """Of the highest priority."""
        return self._by_priority[0] if self._by_priority else None

    @property
    def fetching(self) -> bool:
        """Whether some wait for the disk."""
        return bool(self._coming)

    @property
    def work_s(self) -> float:
        """All the prefill that is waited for, on the whole device."""
        return sum(job.work_s for job in self._by_priority)

    def by_priority(self) -> tuple[Queued, ...]:
        self._renew()
        return tuple(self._by_priority)

    def by_due(self) -> tuple[Queued, ...]:
        """By tier and TTFT deadline."""
        self._renew()
        return tuple(self._by_due)

    def jobs(self, sequences: Iterable[Sequence]) -> tuple[Queued, ...]:
        """Of those of them that schedulers see."""
        self._renew()
        return tuple(self._by_priority[self._place(each)] for each in sequences if each.id not in self._coming)

    def add(self, sequence: Sequence) -> None:
        """It waits from now on. What of its prompt is on the disk alone is fetched first, if that should take less time
        than to compute it, and until then no scheduler sees it: what is computed meanwhile would be computed for
        nothing."""
        self._sequences[sequence.id] = sequence
        if self._names is not None:
            keys = self._findable(sequence, self._names)
            self._cache.present.follow(sequence.id, keys)
            self._cache.held.follow(sequence.id, keys)
            if sequence.asker is None:  # not when it comes back: that is no turn
                lasting = self._names.lasting(keys, sequence.request)
                sequence.asker = Asker(self._cache.turns.next(lasting), sequence.request.tier.rank)
                self._ahead.came(sequence.id, lasting, sequence.request.arrival_s)
            self._cache.asked_for(keys, sequence.asker)
            coming = self._cache.want(keys, sequence.asker) if self._fetch_pays(sequence, keys) else set()
            if coming:
                self._coming[sequence.id] = coming
                for key in coming:
                    self._wanting.setdefault(key, set()).add(sequence.id)
                return
        self._show(sequence)

    def remove(self, sequence: Sequence) -> Queued | None:
        """What was known of it; None if it does not wait."""
        if self._sequences.pop(sequence.id, None) is None:
            return None
        job = self._made(sequence)
        if self._names is not None:
            self._cache.present.leave(sequence.id)
            self._cache.held.leave(sequence.id)
        if not self._wants_nothing_more(sequence.id):
            job = self._by_priority.pop(self._place(sequence))
            del self._by_due[bisect_left(self._by_due, _due(job), key=_due)]
        return job

    def fetched(self, key: Key) -> None:
        """A fetch has ended, well or not."""
        for name in self._wanting.pop(key, ()):
            coming = self._coming[name]
            coming.discard(key)
            if not coming:
                del self._coming[name]
                self._show(self._sequences[name])

    def lose_patience(self, now_s: float) -> None:
        """Who has waited too long for the disk is computed instead."""
        if self._coming:
            for name in list(self._coming):
                sequence = self._sequences[name]
                if now_s > sequence.request.arrival_s + DISK_PATIENCE_S:
                    self._wants_nothing_more(name)
                    self._show(sequence)

    def _fetch_pays(self, sequence: Sequence, keys: list[Key]) -> bool:
        blocks = self._cache.fetchable(keys)
        if not blocks:
            return False
        tokens, here = len(sequence.tokens), self._cache.present.reached(sequence.id)
        with_it, without = ((there * self._block_tokens, tokens) for there in (here + blocks, here))
        saved_s = self._prefill_s(prefill_work((without,))) - self._prefill_s(prefill_work((with_it,)))
        if self._fetch_s(blocks) < saved_s:
            return True
        self._not_worth_it += 1
        return self._not_worth_it % TRIED_ANYWAY == 0

    def _wants_nothing_more(self, name: str) -> bool:
        """Whether it wanted something."""
        coming = self._coming.pop(name, None)
        for key in coming or ():
            self._wanting[key].discard(name)  # the entry goes when the fetch ends
        return coming is not None

    def _show(self, sequence: Sequence) -> None:
        job = self._made(sequence)
        insort(self._by_priority, job, key=_PRIORITY)
        insort(self._by_due, job, key=_due)

    def _findable(self, sequence: Sequence, names: BlockNames) -> list[Key]:
        """The names of its blocks that need no computing if they are there; at least one token is left to compute."""
        if sequence.request.sampling.prompt_logprobs is not None and not sequence.prompt_logprobs_sent:
            return []  # what KV does not tell
        blocks = (len(sequence.tokens) - 1) // self._block_tokens
        names.extend(sequence.keys, sequence.request, sequence.tokens, blocks)
        return sequence.keys[:blocks]

    def _made(self, sequence: Sequence) -> Queued:
        tokens, cached, shared = len(sequence.tokens), 0, 0
        if self._names is not None:
            cached = self._cache.present.reached(sequence.id) * self._block_tokens
            shared = self._cache.held.reached(sequence.id)
        sequence.work_s = self._prefill_s(prefill_work(((cached, tokens),)))
        return Queued(sequence.id, sequence.priority, tokens, sequence.ttft_due_s, sequence.work_s, cached, shared)

    def _renew(self) -> None:
        """Where more or less of a prompt is there by now."""
        for name in self._cache.present.take_moved() | self._cache.held.take_moved():
            if name in self._coming:
                continue
            sequence = self._sequences[name]
            at = self._place(sequence)
            old, new = self._by_priority[at], self._made(sequence)
            self._by_priority[at] = new
            self._by_due[bisect_left(self._by_due, _due(old), key=_due)] = new

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self._by_priority, sequence.priority, key=_PRIORITY)
