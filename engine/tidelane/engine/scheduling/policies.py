"""The policies by name, each with its own order of prompts or with ours."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.scheduling.chunked import ChunkedScheduler
from tidelane.engine.scheduling.lanes import LanesScheduler
from tidelane.engine.scheduling.mixed import MixedScheduler
from tidelane.engine.scheduling.order import FirstCome, MooreHodgson, Order
from tidelane.engine.scheduling.plan import Scheduler
from tidelane.engine.scheduling.refusal import EarlyRefusal, Paced
from tidelane.engine.scheduling.streams import WithStreams


class OrderName(StrEnum):
    OWN = "own"  # as the policy was published: first come
    OURS = "ours"


def policy(
    name: str,
    order: OrderName | str = OrderName.OURS,
    *,
    max_running: int = 256,
    chunk_tokens: int | None = None,
    split: Partition | None = None,
) -> Scheduler:
    """`name` is mixed, chunked, static, lanes, auto or disaggregated.

    `chunk_tokens` is for chunked (None: chosen for each pass). `split` is for static and disaggregated, where it is
    the whole of one device for each phase. In our order, which knows who will be late, any of them can refuse those.
    """
    if OrderName(order) is OrderName.OWN:
        return _with_streams(name, _paced(name, FirstCome(), max_running, chunk_tokens, split))
    return EarlyRefusal(_with_streams(name, _paced(name, MooreHodgson(), max_running, chunk_tokens, split)))


def _with_streams(name: str, scheduler: Paced) -> Paced:
    return WithStreams(scheduler, lanes=name in ("static", "lanes", "auto"))


def _paced(name: str, arrange: Order, max_running: int, chunk_tokens: int | None, split: Partition | None) -> Paced:
    match name:
        case "mixed":
            return MixedScheduler(arrange, max_running=max_running)
        case "chunked":
            return ChunkedScheduler(arrange, chunk_tokens=chunk_tokens, max_running=max_running)
        case "static" | "disaggregated":
            if split is None:
                raise ValueError(f"{name} needs a split")
            return LanesScheduler(arrange, fixed=split, apart=name == "disaggregated", max_running=max_running)
        case "lanes":
            return LanesScheduler(arrange, max_running=max_running)
        case "auto":
            return LanesScheduler(arrange, fuse=True, max_running=max_running)
        case _:
            raise ValueError(f"no policy {name!r}: choose mixed, chunked, static, lanes, auto or disaggregated")


def apart_policies(split: Partition) -> Mapping[str, Scheduler]:
    """The only one of an engine of two processes, which have these units."""
    return {"Disaggregated": policy("disaggregated", split=split)}


def live_policies(table: PartitionTable) -> Mapping[str, Scheduler]:
    """What one engine may be told to switch between, by `spec.execution.mode`."""
    policies = {
        "Lanes": policy("lanes"),
        "Auto": policy("auto"),
        "ChunkedPrefill": policy("chunked"),
        "MixedBatch": policy("mixed", OrderName.OWN),
    }
    if table.splits:
        # The middle of the table: half and half, or what comes next to it.
        policies["StaticLanes"] = policy("static", split=table.splits[len(table.splits) // 2])
    else:
        policies["StaticLanes"] = policies["Lanes"]
    return policies
