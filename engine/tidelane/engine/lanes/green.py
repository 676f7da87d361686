"""GPU lanes: streams of CUDA green contexts, so that what a lane launches runs on the lane's SMs alone.

The device is split once, into small groups of SMs, and every lane is a union of groups: decode's of the first ones,
prefill's of the last, as on the cores of a CPU. So a decode lane and a prefill lane are disjoint whenever their units
fit the device together, also when they belong to different rows of the table. All contexts and streams are made at
start; moving the border means launching on another stream. docs/gpu.md says what of this has run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tidelane.engine.lanes.partition import Partition, PartitionTable, partition_table, sm_group, sm_table

_log = logging.getLogger(__name__)

# Streams that share a hardware queue wait for each other. The default is 8; there are two for each row and one more.
QUEUES = "32"


class NoGreenContexts(RuntimeError):
    """This GPU or its driver cannot give SMs to one lane alone: plain streams still work."""


def widen_queues(environment: MutableMapping[str, str]) -> None:
    """Ask for a hardware queue per stream, unless the user has chosen. Call before CUDA starts."""
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)


@dataclass(frozen=True, slots=True)
class StreamLanes:
    """The streams of all partitions, by units; that of the whole device serves both phases.

    `disjoint`: each lane has its SMs to itself. Without, streams have priorities and share all SMs.
    """

    table: PartitionTable
    disjoint: bool
    whole: torch.cuda.Stream
    decode_lanes: Mapping[int, torch.cuda.Stream]
    prefill_lanes: Mapping[int, torch.cuda.Stream]
    release: Callable[[], None]

    def decode(self, units: int) -> torch.cuda.Stream:
        return self.whole if units == self.table.units else self.decode_lanes[units]

    def prefill(self, units: int) -> torch.cuda.Stream:
        return self.whole if units == self.table.units else self.prefill_lanes[units]

    def close(self) -> None:
        """Call when nothing runs on the lanes any more and no graph captured on them will be replayed."""
        self.release()


def open_lanes(device: torch.device) -> StreamLanes:
    """Green contexts if the driver has them, else plain streams, and the log says why."""
    torch.zeros(1, device=device)  # the contexts hang on torch's own, which its first use creates
    facts = torch.cuda.get_device_properties(device)
    units, capability = facts.multi_processor_count, (facts.major, facts.minor)
    _, urgent = torch.cuda.Stream.priority_range()  # type: ignore[call-arg] # static, whatever torch's stub says
    whole = _stream_of(device, urgent)
    try:
        contexts = open_green(_driver(), device.index or 0, sm_group(capability), urgent)
    except (NoGreenContexts, ValueError) as why:
        _log.warning("decode and prefill share all SMs of this GPU: %s", why)
        return _plain_lanes(device, units, capability, whole, urgent)

    def streams(handles: Mapping[int, int]) -> dict[int, torch.cuda.Stream]:
        return {n: torch.cuda.ExternalStream(handle, device) for n, handle in handles.items()}  # type: ignore[no-untyped-call]

    table = PartitionTable(units, contexts.rows)
    return StreamLanes(table, True, whole, streams(contexts.decode), streams(contexts.prefill), contexts.close)


def _plain_lanes(
    device: torch.device, units: int, capability: tuple[int, int], whole: torch.cuda.Stream, urgent: int
) -> StreamLanes:
    splits = sm_table(units, capability).splits if capability >= (7, 0) else ()
    decode = {row.decode_units: _stream_of(device, urgent) for row in splits}
    prefill = {row.prefill_units: _stream_of(device, 0) for row in splits}
    return StreamLanes(PartitionTable(units, splits), False, whole, decode, prefill, lambda: None)


def _stream_of(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


# ---- the driver ------------------------------------------------------------------------------------------------------


def _driver() -> Any:
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ImportError as error:
        raise NoGreenContexts("the package cuda-bindings is not installed") from error
    return driver


@dataclass(slots=True)
class GreenContexts:
    """Owns the contexts and their streams. `decode` and `prefill` are stream handles by units."""

    rows: tuple[Partition, ...]
    decode: Mapping[int, int] = field(default_factory=dict)
    prefill: Mapping[int, int] = field(default_factory=dict)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def close(self) -> None:
        while self.undo:
            self.undo.pop()()  # a stream goes before its context


@dataclass(frozen=True, slots=True)
class _Split:
    """SM resources of the driver's for one row of the table."""

    decode: Sequence[Any]
    prefill: Sequence[Any]

    @property
    def partition(self) -> Partition:
        return Partition(_sms(self.decode), _sms(self.prefill))


def open_green(driver: Any, device_index: int, group: int, decode_priority: int) -> GreenContexts:
    """Contexts for each row, `group` SMs the smallest part. Raises NoGreenContexts when the driver will not.

    Tries one split for all rows, then the same without the SMs that fill no group (not every driver joins them with
    others), then a split for each row, which old drivers have only: lanes of different rows may then overlap.
    """
    if not hasattr(driver, "cuGreenCtxStreamCreate"):
        raise NoGreenContexts("cuda-bindings is too old for green contexts: 12.8 or newer is needed")
    _ask(driver, driver.cuInit(0))
    device = _ask(driver, driver.cuDeviceGet(device_index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _ask(driver, driver.cuDeviceGetDevResource(device, kind))
    refusals: list[str] = []
    for split in (_split_once, _split_once_without_rest, _split_each_row):
        try:
            return _contexts(driver, device, list(split(driver, whole, group)), decode_priority)
        except NoGreenContexts as refusal:
            refusals.append(f"{split.__name__.lstrip('_').replace('_', ' ')}: {refusal}")
    raise NoGreenContexts("; ".join(refusals))


def _split_once(driver: Any, whole: Any, group: int) -> Iterator[_Split]:
    groups, rest = _groups(driver, whole, group, whole.sm.smCount // group)
    for first_of_prefill in _cuts(len(groups)):
        yield _Split(groups[:first_of_prefill], [*groups[first_of_prefill:], *rest])


def _split_once_without_rest(driver: Any, whole: Any, group: int) -> Iterator[_Split]:
    groups, _ = _groups(driver, whole, group, whole.sm.smCount // group)
    for first_of_prefill in _cuts(len(groups)):
        yield _Split(groups[:first_of_prefill], groups[first_of_prefill:])


def _split_each_row(driver: Any, whole: Any, group: int) -> Iterator[_Split]:
    for cut in _cuts(whole.sm.smCount // group):
        groups, rest = _groups(driver, whole, cut * group, 1)
        yield _Split(groups, rest)


def _cuts(groups: int) -> list[int]:
    """How many of the groups are decode's in each row of the table."""
    return [row.decode_units for row in partition_table(groups).splits]


def _groups(driver: Any, whole: Any, size: int, count: int) -> tuple[list[Any], list[Any]]:
    """Up to `count` groups of at least `size` SMs, and what is left over, if anything is."""
    groups, made, rest = _ask(driver, driver.cuDevSmResourceSplitByCount(count, whole, 0, size))
    return list(groups[:made]), [rest] if rest.sm.smCount else []


def _contexts(driver: Any, device: Any, splits: Sequence[_Split], decode_priority: int) -> GreenContexts:
    made = GreenContexts(tuple(split.partition for split in splits))
    if not splits:
        raise NoGreenContexts("it has too few SMs to be split")
    try:
        made.decode = {_sms(s.decode): _stream(driver, device, s.decode, decode_priority, made) for s in splits}
        made.prefill = {_sms(s.prefill): _stream(driver, device, s.prefill, 0, made) for s in splits}
    except NoGreenContexts:
        made.close()
        raise
    return made


def _stream(driver: Any, device: Any, resources: Sequence[Any], priority: int, owner: GreenContexts) -> int:
    """A stream that runs on `resources`, in a context of its own."""
    description = _ask(driver, driver.cuDevResourceGenerateDesc(list(resources), len(resources)))
    # The flag is required, though nobody uses the default stream.
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _ask(driver, driver.cuGreenCtxCreate(description, device, flags))
    owner.undo.append(lambda: driver.cuGreenCtxDestroy(context))
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _ask(driver, driver.cuGreenCtxStreamCreate(context, non_blocking, priority))
    owner.undo.append(lambda: driver.cuStreamDestroy(stream))
    return int(stream)


def _sms(resources: Sequence[Any]) -> int:
    return sum(int(resource.sm.smCount) for resource in resources)


def _ask(driver: Any, answer: tuple[Any, ...]) -> Any:
    """What the driver answered, past its error code."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise NoGreenContexts(f"the driver says {getattr(code, 'name', code)}")
    return values[0] if len(values) == 1 else tuple(values)
