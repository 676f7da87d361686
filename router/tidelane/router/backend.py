"""One backend's books: what it told of itself, what was sent there, how that fared. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from tidelane.engine.load import Load
from tidelane.engine.request import ServiceTier
from tidelane.router.address import Address
from tidelane.router.ask import Ask
from tidelane.router.choice import ANY_TIME, Fitness, View
from tidelane.router.ejection import HEALTHY
from tidelane.router.pace import Pace
from tidelane.router.prefixes import PIECE_TOKENS, Kept

# Without news for so long, a backend is in doubt. Several polls may be lost on a busy machine.
STALE_S: Final = 3.0
# Names that are remembered of a backend at most, whatever its cache holds.
MOST_NAMES: Final = 1 << 16


@dataclass(eq=False, slots=True)
class Sent:
    """A request on its way there, or answered there. `give_up` ends it, while its client has been sent nothing."""

    tier: ServiceTier
    tokens: int
    at_s: float
    give_up: Callable[[], None] | None = None


class Backend:
    """Only the event loop's thread touches it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.record = HEALTHY
        self.pace = Pace()
        self.load: Load | None = None
        self.ejections = 0
        self._spoke_s = 0.0  # when it said so, by our clock
        self._heard_s: float | None = None
        self._kept = Kept(MOST_NAMES)
        self._sent: set[Sent] = set()

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    # ---- what happens ---------------------------------------------------------------------------------------------

    def heard(self, load: Load, now_s: float) -> None:
        if self.load is not None and self.load.started_s != load.started_s:
            self._kept.forget()  # another process: its cache is empty
        self.load = load
        self._spoke_s = now_s - load.age_s
        self._heard_s = now_s
        if load.kv_kept_tokens:
            self._kept.hold(min(MOST_NAMES, load.kv_kept_tokens // PIECE_TOKENS))

    def gone(self) -> None:
        """Nothing listens there: what it said last is of no use."""
        self._spoke_s = -STALE_S

    def closed(self) -> None:
        """It answered that it takes no requests now; until it says otherwise, none goes there."""
        if self.load is not None:
            self.load = msgspec.structs.replace(self.load, ready=False)

    def hangs(self, silent_s: float, now_s: float) -> None:
        """It takes connections and says nothing. After `silent_s` of that, what it has not begun to answer is given
        up."""
        if self._heard_s is not None and now_s - self._heard_s > silent_s:
            for sent in tuple(self._sent):
                if sent.give_up is not None:
                    sent.give_up()

    @contextmanager
    def holding(self, ask: Ask, resident_tokens: int, now_s: float) -> Iterator[Sent]:
        """While a request is there."""
        sent = Sent(ask.tier, max(0, ask.prompt_tokens - resident_tokens), now_s)
        self._sent.add(sent)
        self._kept.sent(ask.names)
        try:
            yield sent
        finally:
            self._sent.discard(sent)

    def succeeded(self) -> None:
        self.record = self.record.succeeded()

    def failed(self, now_s: float) -> None:
        before = self.record
        self.record = before.failed(now_s)
        self.ejections += self.record.ejections > before.ejections

    def measured(self, predicted_s: float, ttft_s: float, now_s: float) -> None:
        self.pace = self.pace.measured(predicted_s / self.pace.factor(now_s), ttft_s, now_s)

    # ---- what is known --------------------------------------------------------------------------------------------

    def fitness(self, now_s: float) -> Fitness:
        if self.load is None or now_s - self._spoke_s > STALE_S:
            return Fitness.DOUBTFUL
        if not self.load.ready:
            return Fitness.CLOSED
        return Fitness.DOUBTFUL if self.record.ejected(now_s) else Fitness.HEALTHY

    def serves(self, model: str | None) -> bool:
        """Whether it may be asked for that model: one that never said what it serves may."""
        return model is None or self.load is None or self.load.model == model

    def view(self, ask: Ask, now_s: float) -> View:
        resident = min(ask.prompt_tokens, self._kept.pieces(ask.names) * PIECE_TOKENS)
        # What it does not know of yet; all else is in its own count.
        unseen = [sent for sent in self._sent if sent.at_s > self._spoke_s]
        load = self.load
        if load is None:
            return View(self.name, self.fitness(now_s), _tokens(unseen, ask.tier), resident, requests=self.in_flight)
        outlook = load.outlook
        queued = sum(outlook.queued_tokens.get(tier, 0) for tier in ServiceTier if tier.rank <= ask.tier.rank)
        computed = max(0.0, now_s - self._spoke_s) * outlook.prefill_tokens_per_s
        interactive = sum(sent.tier is not ServiceTier.FLEX for sent in unseen)
        there = sum(outlook.requests.values())
        return View(
            name=self.name,
            fitness=self.fitness(now_s),
            tokens_before=max(0.0, queued - computed) + _tokens(unseen, ask.tier),
            resident_tokens=resident,
            prefill_tokens_per_s=outlook.prefill_tokens_per_s,
            pace=self.pace.factor(now_s),
            step_s=outlook.step_s + outlook.step_more_s * len(unseen),
            requests=there + len(unseen),
            interactive=there - outlook.requests.get(ServiceTier.FLEX, 0) + interactive,
            kv_free_tokens=load.kv_free_tokens - sum(sent.tokens for sent in unseen) if load.kv_tokens else None,
            slo=load.slo or ANY_TIME,
        )


def _tokens(unseen: Iterable[Sent], tier: ServiceTier) -> int:
    """Of those that come before a request of `tier`."""
    return sum(sent.tokens for sent in unseen if sent.tier.rank <= tier.rank)
