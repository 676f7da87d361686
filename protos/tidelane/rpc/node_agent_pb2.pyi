from tidelane.rpc import serving_pb2 as _serving_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaId(_message.Message):
    __slots__ = ("namespace", "service", "service_uid", "index")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_UID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    service: str
    service_uid: str
    index: int
    def __init__(self, namespace: _Optional[str] = ..., service: _Optional[str] = ..., service_uid: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class ReplicaSpec(_message.Message):
    __slots__ = ("id", "generation", "model", "objective", "kv_cache", "devices", "port")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    id: ReplicaId
    generation: int
    model: ModelSpec
    objective: _serving_pb2.Objective
    kv_cache: KvCacheSpec
    devices: int
    port: int
    def __init__(self, id: _Optional[_Union[ReplicaId, _Mapping]] = ..., generation: _Optional[int] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., objective: _Optional[_Union[_serving_pb2.Objective, _Mapping]] = ..., kv_cache: _Optional[_Union[KvCacheSpec, _Mapping]] = ..., devices: _Optional[int] = ..., port: _Optional[int] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("source", "dtype", "max_context_tokens", "served_name")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    source: str
    dtype: str
    max_context_tokens: int
    served_name: str
    def __init__(self, source: _Optional[str] = ..., dtype: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., served_name: _Optional[str] = ...) -> None: ...

class KvCacheSpec(_message.Message):
    __slots__ = ("dtype", "host_memory_bytes", "nvme_bytes", "idle_timeout_s", "prefetch")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    host_memory_bytes: int
    nvme_bytes: int
    idle_timeout_s: float
    prefetch: bool
    def __init__(self, dtype: _Optional[str] = ..., host_memory_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., idle_timeout_s: _Optional[float] = ..., prefetch: _Optional[bool] = ...) -> None: ...

class ApplyReplicaRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: ReplicaSpec
    def __init__(self, spec: _Optional[_Union[ReplicaSpec, _Mapping]] = ...) -> None: ...

class RemoveReplicaRequest(_message.Message):
    __slots__ = ("id", "drain_deadline_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    id: ReplicaId
    drain_deadline_s: float
    def __init__(self, id: _Optional[_Union[ReplicaId, _Mapping]] = ..., drain_deadline_s: _Optional[float] = ...) -> None: ...

class RemoveReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchNodeRequest(_message.Message):
    __slots__ = ("period_s",)
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    def __init__(self, period_s: _Optional[float] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_name", "agent_instance", "agent_version", "address", "devices", "replicas", "accepts_replicas")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    agent_instance: str
    agent_version: str
    address: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    accepts_replicas: bool
    def __init__(self, node_name: _Optional[str] = ..., agent_instance: _Optional[str] = ..., agent_version: _Optional[str] = ..., address: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., accepts_replicas: _Optional[bool] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "kind", "name", "memory_bytes", "compute_units", "healthy", "held_by", "slots", "claimed_memory_bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Device.Kind]
        CPU: _ClassVar[Device.Kind]
        GPU: _ClassVar[Device.Kind]
    KIND_UNSPECIFIED: Device.Kind
    CPU: Device.Kind
    GPU: Device.Kind
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_UNITS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: Device.Kind
    name: str
    memory_bytes: int
    compute_units: int
    healthy: bool
    held_by: _containers.RepeatedCompositeFieldContainer[ReplicaId]
    slots: int
    claimed_memory_bytes: int
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[_Union[Device.Kind, str]] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., compute_units: _Optional[int] = ..., healthy: _Optional[bool] = ..., held_by: _Optional[_Iterable[_Union[ReplicaId, _Mapping]]] = ..., slots: _Optional[int] = ..., claimed_memory_bytes: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("id", "generation", "serving_generation", "phase", "message", "host", "port", "restarts", "restart_in_s", "device_ids", "engine", "ready_since_unix_s", "model_loaded", "objective", "serves_objective", "running")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[ReplicaStatus.Phase]
        STARTING: _ClassVar[ReplicaStatus.Phase]
        READY: _ClassVar[ReplicaStatus.Phase]
        DRAINING: _ClassVar[ReplicaStatus.Phase]
        BACKING_OFF: _ClassVar[ReplicaStatus.Phase]
        FAILED: _ClassVar[ReplicaStatus.Phase]
    PHASE_UNSPECIFIED: ReplicaStatus.Phase
    STARTING: ReplicaStatus.Phase
    READY: ReplicaStatus.Phase
    DRAINING: ReplicaStatus.Phase
    BACKING_OFF: ReplicaStatus.Phase
    FAILED: ReplicaStatus.Phase
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SERVING_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RESTART_IN_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    READY_SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_LOADED_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    SERVES_OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    id: ReplicaId
    generation: int
    serving_generation: int
    phase: ReplicaStatus.Phase
    message: str
    host: str
    port: int
    restarts: int
    restart_in_s: float
    device_ids: _containers.RepeatedScalarFieldContainer[str]
    engine: _serving_pb2.EngineStatus
    ready_since_unix_s: float
    model_loaded: bool
    objective: _serving_pb2.Objective
    serves_objective: bool
    running: ReplicaSpec
    def __init__(self, id: _Optional[_Union[ReplicaId, _Mapping]] = ..., generation: _Optional[int] = ..., serving_generation: _Optional[int] = ..., phase: _Optional[_Union[ReplicaStatus.Phase, str]] = ..., message: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., restarts: _Optional[int] = ..., restart_in_s: _Optional[float] = ..., device_ids: _Optional[_Iterable[str]] = ..., engine: _Optional[_Union[_serving_pb2.EngineStatus, _Mapping]] = ..., ready_since_unix_s: _Optional[float] = ..., model_loaded: _Optional[bool] = ..., objective: _Optional[_Union[_serving_pb2.Objective, _Mapping]] = ..., serves_objective: _Optional[bool] = ..., running: _Optional[_Union[ReplicaSpec, _Mapping]] = ...) -> None: ...
