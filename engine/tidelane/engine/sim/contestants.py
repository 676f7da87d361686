"""Who competes: policies, each in an order of prompts, and the settings that each can be tuned by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.scheduling.plan import Scheduler
from tidelane.engine.scheduling.policies import OrderName, policy

DISAGGREGATED = "disaggregated"
POLICIES = ("mixed", "chunked", "static", "lanes", "auto", DISAGGREGATED)
CHUNKS = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Setting:
    """`name` says it to a person; empty where there is nothing to tune."""

    name: str = ""
    chunk_tokens: int | None = None
    split: Partition | None = None


class Competitor(Protocol):
    """What a report shows of whoever has a line in it."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> str:
        """Those of one policy share a colour."""
        ...

    @property
    def dashed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Contestant:
    policy: str
    order: OrderName

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.order.value}"

    @property
    def dashed(self) -> bool:
        """In charts, where both orders of one policy share a colour."""
        return self.order is OrderName.OWN

    @property
    def apart(self) -> bool:
        """Its prefill and decode are on different GPUs."""
        return self.policy == DISAGGREGATED

    def settings(self, table: PartitionTable) -> tuple[Setting, ...]:
        """All that it may be tuned to on such a device."""
        if self.policy == "chunked":
            return (*(Setting(f"{tokens} tokens", chunk_tokens=tokens) for tokens in CHUNKS), Setting("by TPOT budget"))
        if self.policy == "static":
            return tuple(Setting(f"{row.decode_units}+{row.prefill_units} units", split=row) for row in table.splits)
        return (Setting(split=table.splits[0] if self.apart else None),)

    def as_served(self, table: PartitionTable) -> Setting:
        """What an engine uses that is told nothing but the mode: see `live_policies`."""
        settings = self.settings(table)
        return settings[len(settings) // 2] if self.policy == "static" else settings[-1]

    def scheduler(self, setting: Setting) -> Scheduler:
        return policy(self.policy, self.order, chunk_tokens=setting.chunk_tokens, split=setting.split)


def contestants(policies: Sequence[str], orders: Sequence[OrderName]) -> tuple[Contestant, ...]:
    return tuple(Contestant(name, order) for name in policies for order in orders)
