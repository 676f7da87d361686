"""Which SMs get into which context, and what is left behind, with a driver that only keeps accounts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any

import pytest

from tidelane.engine.lanes.green import NoGreenContexts, open_green, widen_queues
from tidelane.engine.lanes.partition import sm_table


class CUresult(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914


class Kinds(Enum):
    CU_DEV_RESOURCE_TYPE_SM = 1


class ContextFlags(Enum):
    CU_GREEN_CTX_DEFAULT_STREAM = 1


class StreamFlags(Enum):
    CU_STREAM_NON_BLOCKING = 1


@dataclass(frozen=True)
class Sm:
    smCount: int  # noqa: N815 - the driver's name


@dataclass(frozen=True)
class Resource:
    """`sms` are the numbers of its SMs; `split` is the call it came from."""

    sms: tuple[int, ...]
    split: int

    @property
    def sm(self) -> Sm:
        return Sm(len(self.sms))


@dataclass
class Driver:
    sms: int
    alignment: int
    joins: bool = True  # resources of one split may be put together
    joins_rest: bool = True
    contexts_left: int = 1000
    contexts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: count(1))
    CUresult = CUresult
    CUdevResourceType = Kinds
    CUgreenCtxCreate_flags = ContextFlags
    CUstream_flags = StreamFlags

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802 - the driver's names, here and below
        return (CUresult.CUDA_SUCCESS,)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:  # noqa: N802
        return CUresult.CUDA_SUCCESS, f"device {index}"

    def cuDeviceGetDevResource(self, device: str, kind: Kinds) -> tuple[Any, ...]:  # noqa: N802
        return CUresult.CUDA_SUCCESS, Resource(tuple(range(self.sms)), 0)

    def cuDevSmResourceSplitByCount(  # noqa: N802
        self, wanted: int, whole: Resource, flags: int, least: int
    ) -> tuple[Any, ...]:
        split = next(self.numbers)
        size = -(-least // self.alignment) * self.alignment
        made = min(wanted, len(whole.sms) // size)
        groups = [Resource(whole.sms[i * size : (i + 1) * size], split) for i in range(made)]
        groups += [Resource((), split)] * (wanted - made)
        return CUresult.CUDA_SUCCESS, groups, made, Resource(whole.sms[made * size :], split)

    def cuDevResourceGenerateDesc(self, resources: list[Resource], number: int) -> tuple[Any, ...]:  # noqa: N802
        assert number == len(resources)
        sizes = {len(resource.sms) for resource in resources}
        same_split = len({resource.split for resource in resources}) == 1
        odd = len(sizes) > 1 and not self.joins_rest
        if number > 1 and (not self.joins or not same_split or odd):
            return CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None
        return CUresult.CUDA_SUCCESS, tuple(sm for resource in resources for sm in resource.sms)

    def cuGreenCtxCreate(self, description: tuple[int, ...], device: str, flags: ContextFlags) -> tuple[Any, ...]:  # noqa: N802
        if not self.contexts_left:
            return CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        self.contexts_left -= 1
        number = next(self.numbers)
        self.contexts[number] = description
        return CUresult.CUDA_SUCCESS, number

    def cuGreenCtxStreamCreate(self, context: int, flags: StreamFlags, priority: int) -> tuple[Any, ...]:  # noqa: N802
        number = next(self.numbers)
        self.streams[number] = context
        self.priorities[number] = priority
        return CUresult.CUDA_SUCCESS, number

    def cuGreenCtxDestroy(self, context: int) -> tuple[Any, ...]:  # noqa: N802
        assert context not in self.streams.values(), "its streams go first"
        del self.contexts[context]
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        del self.streams[stream]
        return (CUresult.CUDA_SUCCESS,)

    def sms_of(self, stream: int) -> set[int]:
        return set(self.contexts[self.streams[stream]])


def test_any_two_lanes_that_fit_the_device_are_disjoint() -> None:
    driver = Driver(132, 8)
    lanes = open_green(driver, 0, 8, -5)
    assert lanes.rows == sm_table(132, (9, 0)).splits
    for decode_units, decode in lanes.decode.items():
        assert len(driver.sms_of(decode)) == decode_units
        assert driver.priorities[decode] == -5
        for prefill_units, prefill in lanes.prefill.items():
            assert len(driver.sms_of(prefill)) == prefill_units
            if decode_units + prefill_units <= 132:
                assert not driver.sms_of(decode) & driver.sms_of(prefill)


def test_what_fills_no_group_is_left_out_where_the_driver_does_not_join_it() -> None:
    driver = Driver(132, 8, joins_rest=False)
    lanes = open_green(driver, 0, 8, 0)
    assert [(row.decode_units, row.prefill_units) for row in lanes.rows][:2] == [(8, 120), (24, 104)]
    assert {len(driver.sms_of(stream)) for stream in lanes.prefill.values()} == {
        row.prefill_units for row in lanes.rows
    }


def test_a_driver_that_joins_nothing_gets_a_split_for_each_row() -> None:
    driver = Driver(108, 2, joins=False)
    lanes = open_green(driver, 0, 4, 0)
    assert lanes.rows == sm_table(108, (8, 0)).splits
    for row in lanes.rows:
        decode, prefill = lanes.decode[row.decode_units], lanes.prefill[row.prefill_units]
        assert not driver.sms_of(decode) & driver.sms_of(prefill)


def test_closing_leaves_nothing_behind() -> None:
    driver = Driver(20, 4)
    lanes = open_green(driver, 0, 4, 0)
    lanes.close()
    lanes.close()
    assert not driver.contexts
    assert not driver.streams


def test_a_failure_half_way_leaves_nothing_behind_and_says_why() -> None:
    driver = Driver(132, 8, contexts_left=5)
    with pytest.raises(NoGreenContexts, match=r"split once: the driver says CUDA_ERROR_NOT_SUPPORTED; .*each row"):
        open_green(driver, 0, 8, 0)
    assert not driver.contexts
    assert not driver.streams


def test_a_gpu_too_small_to_be_split() -> None:
    with pytest.raises(NoGreenContexts, match="too few SMs"):
        open_green(Driver(7, 4), 0, 4, 0)


def test_bindings_that_know_no_green_contexts() -> None:
    with pytest.raises(NoGreenContexts, match="too old"):
        open_green(object(), 0, 8, 0)


def test_the_bindings_installed_here_have_what_is_called() -> None:
    from cuda.bindings import driver  # type: ignore[import-untyped]

    for name in [name for name in dir(Driver) if name.startswith("cu")]:
        assert callable(getattr(driver, name))
    assert driver.CUresult.CUDA_SUCCESS.name == "CUDA_SUCCESS"
    assert driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    assert driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM


def test_queues_are_the_users_choice_first() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    widen_queues(environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    widen_queues(environment := {})
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
