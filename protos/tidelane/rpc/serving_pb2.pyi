from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutionMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_MODE_UNSPECIFIED: _ClassVar[ExecutionMode]
    LANES: _ClassVar[ExecutionMode]
    AUTO: _ClassVar[ExecutionMode]
    CHUNKED_PREFILL: _ClassVar[ExecutionMode]
    MIXED_BATCH: _ClassVar[ExecutionMode]
    STATIC_LANES: _ClassVar[ExecutionMode]
    DISAGGREGATED: _ClassVar[ExecutionMode]

class LateRequests(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LATE_REQUESTS_UNSPECIFIED: _ClassVar[LateRequests]
    SERVE: _ClassVar[LateRequests]
    REFUSE: _ClassVar[LateRequests]
EXECUTION_MODE_UNSPECIFIED: ExecutionMode
LANES: ExecutionMode
AUTO: ExecutionMode
CHUNKED_PREFILL: ExecutionMode
MIXED_BATCH: ExecutionMode
STATIC_LANES: ExecutionMode
DISAGGREGATED: ExecutionMode
LATE_REQUESTS_UNSPECIFIED: LateRequests
SERVE: LateRequests
REFUSE: LateRequests

class WatchStatusRequest(_message.Message):
    __slots__ = ("period_s",)
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    def __init__(self, period_s: _Optional[float] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("ttft_s", "ttft_per_1k_input_tokens_s", "tpot_s", "percentile", "max_token_gap_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_PER_1K_INPUT_TOKENS_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PERCENTILE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_GAP_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    ttft_per_1k_input_tokens_s: float
    tpot_s: float
    percentile: int
    max_token_gap_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., ttft_per_1k_input_tokens_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., percentile: _Optional[int] = ..., max_token_gap_s: _Optional[float] = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("slo", "mode", "min_decode_share", "max_decode_share", "revision", "late_requests")
    SLO_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MIN_DECODE_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_DECODE_SHARE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LATE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    slo: Slo
    mode: ExecutionMode
    min_decode_share: float
    max_decode_share: float
    revision: int
    late_requests: LateRequests
    def __init__(self, slo: _Optional[_Union[Slo, _Mapping]] = ..., mode: _Optional[_Union[ExecutionMode, str]] = ..., min_decode_share: _Optional[float] = ..., max_decode_share: _Optional[float] = ..., revision: _Optional[int] = ..., late_requests: _Optional[_Union[LateRequests, str]] = ...) -> None: ...

class SetObjectiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("state", "message", "model_name", "model_digest", "listen", "objective_revision", "load", "latency", "lanes", "pid", "resident_memory_bytes", "reach", "workload")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[EngineStatus.State]
        LOADING: _ClassVar[EngineStatus.State]
        WARMING: _ClassVar[EngineStatus.State]
        READY: _ClassVar[EngineStatus.State]
        DRAINING: _ClassVar[EngineStatus.State]
    STATE_UNSPECIFIED: EngineStatus.State
    LOADING: EngineStatus.State
    WARMING: EngineStatus.State
    READY: EngineStatus.State
    DRAINING: EngineStatus.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_REVISION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    state: EngineStatus.State
    message: str
    model_name: str
    model_digest: str
    listen: str
    objective_revision: int
    load: Load
    latency: Latency
    lanes: Lanes
    pid: int
    resident_memory_bytes: int
    reach: Reach
    workload: Workload
    def __init__(self, state: _Optional[_Union[EngineStatus.State, str]] = ..., message: _Optional[str] = ..., model_name: _Optional[str] = ..., model_digest: _Optional[str] = ..., listen: _Optional[str] = ..., objective_revision: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., lanes: _Optional[_Union[Lanes, _Mapping]] = ..., pid: _Optional[int] = ..., resident_memory_bytes: _Optional[int] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., workload: _Optional[_Union[Workload, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_total", "kv_blocks_free", "preemptions", "rejected", "kv_pressure")
    class Pressure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRESSURE_UNSPECIFIED: _ClassVar[Load.Pressure]
        NONE: _ClassVar[Load.Pressure]
        WAITING: _ClassVar[Load.Pressure]
        PREEMPTING: _ClassVar[Load.Pressure]
        REFUSING: _ClassVar[Load.Pressure]
    PRESSURE_UNSPECIFIED: Load.Pressure
    NONE: Load.Pressure
    WAITING: Load.Pressure
    PREEMPTING: Load.Pressure
    REFUSING: Load.Pressure
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    KV_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    preemptions: int
    rejected: int
    kv_pressure: Load.Pressure
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., preemptions: _Optional[int] = ..., rejected: _Optional[int] = ..., kv_pressure: _Optional[_Union[Load.Pressure, str]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("window_s", "requests", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "token_gap_p99_s", "queue_p99_s", "ttft_at_percentile_s", "tpot_at_percentile_s", "attainment", "goodput_rps", "ttft_target_ratio_at_percentile", "queue_p90_s", "queue_at_percentile_s", "prefill_p50_s", "prefill_at_percentile_s")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_P99_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GAP_P99_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_P99_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_AT_PERCENTILE_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_AT_PERCENTILE_S_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_RPS_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_RATIO_AT_PERCENTILE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_P90_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_AT_PERCENTILE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_P50_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_AT_PERCENTILE_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    token_gap_p99_s: float
    queue_p99_s: float
    ttft_at_percentile_s: float
    tpot_at_percentile_s: float
    attainment: float
    goodput_rps: float
    ttft_target_ratio_at_percentile: float
    queue_p90_s: float
    queue_at_percentile_s: float
    prefill_p50_s: float
    prefill_at_percentile_s: float
    def __init__(self, window_s: _Optional[float] = ..., requests: _Optional[int] = ..., ttft_p50_s: _Optional[float] = ..., ttft_p99_s: _Optional[float] = ..., tpot_p50_s: _Optional[float] = ..., tpot_p99_s: _Optional[float] = ..., token_gap_p99_s: _Optional[float] = ..., queue_p99_s: _Optional[float] = ..., ttft_at_percentile_s: _Optional[float] = ..., tpot_at_percentile_s: _Optional[float] = ..., attainment: _Optional[float] = ..., goodput_rps: _Optional[float] = ..., ttft_target_ratio_at_percentile: _Optional[float] = ..., queue_p90_s: _Optional[float] = ..., queue_at_percentile_s: _Optional[float] = ..., prefill_p50_s: _Optional[float] = ..., prefill_at_percentile_s: _Optional[float] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("input_tokens", "ttft_s", "tpot_s")
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    input_tokens: int
    ttft_s: float
    tpot_s: float
    def __init__(self, input_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ...) -> None: ...

class Lanes(_message.Message):
    __slots__ = ("compute_units", "decode_compute_units", "prefill_compute_units", "realised_split_share", "realised_decode_alone_share", "realised_prefill_alone_share", "realised_mixed_share", "idle_share", "realised_decode_unit_share", "moves")
    COMPUTE_UNITS_FIELD_NUMBER: _ClassVar[int]
    DECODE_COMPUTE_UNITS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_UNITS_FIELD_NUMBER: _ClassVar[int]
    REALISED_SPLIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    REALISED_DECODE_ALONE_SHARE_FIELD_NUMBER: _ClassVar[int]
    REALISED_PREFILL_ALONE_SHARE_FIELD_NUMBER: _ClassVar[int]
    REALISED_MIXED_SHARE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    REALISED_DECODE_UNIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    compute_units: int
    decode_compute_units: int
    prefill_compute_units: int
    realised_split_share: float
    realised_decode_alone_share: float
    realised_prefill_alone_share: float
    realised_mixed_share: float
    idle_share: float
    realised_decode_unit_share: float
    moves: int
    def __init__(self, compute_units: _Optional[int] = ..., decode_compute_units: _Optional[int] = ..., prefill_compute_units: _Optional[int] = ..., realised_split_share: _Optional[float] = ..., realised_decode_alone_share: _Optional[float] = ..., realised_prefill_alone_share: _Optional[float] = ..., realised_mixed_share: _Optional[float] = ..., idle_share: _Optional[float] = ..., realised_decode_unit_share: _Optional[float] = ..., moves: _Optional[int] = ...) -> None: ...

class Workload(_message.Message):
    __slots__ = ("observed_s", "requests", "flex_requests", "gaps", "gaps_s", "gaps_squared_s2", "prompt_tokens", "output_tokens", "reused_tokens", "machine")
    OBSERVED_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FLEX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    GAPS_S_FIELD_NUMBER: _ClassVar[int]
    GAPS_SQUARED_S2_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    observed_s: float
    requests: int
    flex_requests: int
    gaps: int
    gaps_s: float
    gaps_squared_s2: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    reused_tokens: Lengths
    machine: Machine
    def __init__(self, observed_s: _Optional[float] = ..., requests: _Optional[int] = ..., flex_requests: _Optional[int] = ..., gaps: _Optional[int] = ..., gaps_s: _Optional[float] = ..., gaps_squared_s2: _Optional[float] = ..., prompt_tokens: _Optional[_Union[Lengths, _Mapping]] = ..., output_tokens: _Optional[_Union[Lengths, _Mapping]] = ..., reused_tokens: _Optional[_Union[Lengths, _Mapping]] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ...) -> None: ...

class Lengths(_message.Message):
    __slots__ = ("counts", "tokens")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("device", "units", "dtype", "layers", "block_tokens", "kv_tokens", "decode_units", "times", "decode_slowdown", "prefill_slowdown", "guard")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_UNITS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    GUARD_FIELD_NUMBER: _ClassVar[int]
    device: str
    units: int
    dtype: str
    layers: int
    block_tokens: int
    kv_tokens: int
    decode_units: _containers.RepeatedScalarFieldContainer[int]
    times: _containers.RepeatedCompositeFieldContainer[PassTimes]
    decode_slowdown: float
    prefill_slowdown: float
    guard: float
    def __init__(self, device: _Optional[str] = ..., units: _Optional[int] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., block_tokens: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., decode_units: _Optional[_Iterable[int]] = ..., times: _Optional[_Iterable[_Union[PassTimes, _Mapping]]] = ..., decode_slowdown: _Optional[float] = ..., prefill_slowdown: _Optional[float] = ..., guard: _Optional[float] = ...) -> None: ...

class PassTimes(_message.Message):
    __slots__ = ("phase", "units", "knots", "linear_s", "pair_s", "context_s", "sequence_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    KNOTS_FIELD_NUMBER: _ClassVar[int]
    LINEAR_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    units: int
    knots: _containers.RepeatedScalarFieldContainer[int]
    linear_s: _containers.RepeatedScalarFieldContainer[float]
    pair_s: float
    context_s: float
    sequence_s: float
    def __init__(self, phase: _Optional[str] = ..., units: _Optional[int] = ..., knots: _Optional[_Iterable[int]] = ..., linear_s: _Optional[_Iterable[float]] = ..., pair_s: _Optional[float] = ..., context_s: _Optional[float] = ..., sequence_s: _Optional[float] = ...) -> None: ...
