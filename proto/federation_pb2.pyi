from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_KIND_UNSPECIFIED: _ClassVar[TensorKind]
    PARAMETER: _ClassVar[TensorKind]
    FLOAT_BUFFER: _ClassVar[TensorKind]
    INTEGER_BUFFER: _ClassVar[TensorKind]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    DENSE: _ClassVar[Mode]
    PAIRS: _ClassVar[Mode]
    BITMAP: _ClassVar[Mode]

class ValueFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_FORMAT_UNSPECIFIED: _ClassVar[ValueFormat]
    RAW: _ClassVar[ValueFormat]

class Coding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAIN: _ClassVar[Coding]
    PACKED: _ClassVar[Coding]
    CHANGE: _ClassVar[Coding]

class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAUSE_UNSPECIFIED: _ClassVar[Cause]
    ALWAYS: _ClassVar[Cause]
    CACHELESS: _ClassVar[Cause]
    AGE: _ClassVar[Cause]
    THRESHOLD: _ClassVar[Cause]
    QUOTA: _ClassVar[Cause]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    MALFORMED: _ClassVar[Code]
    UNEXPECTED: _ClassVar[Code]
    WRONG_ROUND: _ClassVar[Code]
    LATE: _ClassVar[Code]
    DUPLICATE: _ClassVar[Code]
    CHECKSUM: _ClassVar[Code]
    NOT_FINITE: _ClassVar[Code]
    TOO_LARGE: _ClassVar[Code]
    TIMEOUT: _ClassVar[Code]
    ABSENT: _ClassVar[Code]
    CLIENT_FAILED: _ClassVar[Code]
    TOO_FEW_CONTRIBUTIONS: _ClassVar[Code]
    WRONG_CONTENT: _ClassVar[Code]
    OVERFLOW: _ClassVar[Code]
    UNKNOWN_BASE: _ClassVar[Code]
    FINISHED: _ClassVar[Code]
    VERSION_MISMATCH: _ClassVar[Code]
    SCHEMA_MISMATCH: _ClassVar[Code]
    UNKNOWN_CLIENT: _ClassVar[Code]
    ALREADY_CONNECTED: _ClassVar[Code]
    EXAMPLES_CHANGED: _ClassVar[Code]
    NOT_JOINED: _ClassVar[Code]
    STOPPING: _ClassVar[Code]
    SILENT: _ClassVar[Code]
    AWAY: _ClassVar[Code]
TENSOR_KIND_UNSPECIFIED: TensorKind
PARAMETER: TensorKind
FLOAT_BUFFER: TensorKind
INTEGER_BUFFER: TensorKind
MODE_UNSPECIFIED: Mode
DENSE: Mode
PAIRS: Mode
BITMAP: Mode
VALUE_FORMAT_UNSPECIFIED: ValueFormat
RAW: ValueFormat
PLAIN: Coding
PACKED: Coding
CHANGE: Coding
CAUSE_UNSPECIFIED: Cause
ALWAYS: Cause
CACHELESS: Cause
AGE: Cause
THRESHOLD: Cause
QUOTA: Cause
CODE_UNSPECIFIED: Code
MALFORMED: Code
UNEXPECTED: Code
WRONG_ROUND: Code
LATE: Code
DUPLICATE: Code
CHECKSUM: Code
NOT_FINITE: Code
TOO_LARGE: Code
TIMEOUT: Code
ABSENT: Code
CLIENT_FAILED: Code
TOO_FEW_CONTRIBUTIONS: Code
WRONG_CONTENT: Code
OVERFLOW: Code
UNKNOWN_BASE: Code
FINISHED: Code
VERSION_MISMATCH: Code
SCHEMA_MISMATCH: Code
UNKNOWN_CLIENT: Code
ALREADY_CONNECTED: Code
EXAMPLES_CHANGED: Code
NOT_JOINED: Code
STOPPING: Code
SILENT: Code
AWAY: Code

class ClientMessage(_message.Message):
    __slots__ = ("join", "score_reply", "update", "chunk", "heartbeat", "abort", "counters", "received")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    SCORE_REPLY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    join: Join
    score_reply: ScoreReply
    update: SparseUpdate
    chunk: Chunk
    heartbeat: Heartbeat
    abort: Abort
    counters: Counters
    received: int
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., score_reply: _Optional[_Union[ScoreReply, _Mapping]] = ..., update: _Optional[_Union[SparseUpdate, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., received: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("sent", "retransmitted", "segments", "data_segments", "header", "mss", "absent")
    SENT_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DATA_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MSS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    sent: int
    retransmitted: int
    segments: int
    data_segments: int
    header: int
    mss: int
    absent: str
    def __init__(self, sent: _Optional[int] = ..., retransmitted: _Optional[int] = ..., segments: _Optional[int] = ..., data_segments: _Optional[int] = ..., header: _Optional[int] = ..., mss: _Optional[int] = ..., absent: _Optional[str] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "model", "chunk", "score_request", "train_order", "reuse_notice", "round_closed", "heartbeat", "abort", "received")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SCORE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ORDER_FIELD_NUMBER: _ClassVar[int]
    REUSE_NOTICE_FIELD_NUMBER: _ClassVar[int]
    ROUND_CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    model: ModelBroadcast
    chunk: Chunk
    score_request: ScoreRequest
    train_order: TrainOrder
    reuse_notice: ReuseNotice
    round_closed: RoundClosed
    heartbeat: Heartbeat
    abort: Abort
    received: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., model: _Optional[_Union[ModelBroadcast, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., score_request: _Optional[_Union[ScoreRequest, _Mapping]] = ..., train_order: _Optional[_Union[TrainOrder, _Mapping]] = ..., reuse_notice: _Optional[_Union[ReuseNotice, _Mapping]] = ..., round_closed: _Optional[_Union[RoundClosed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., received: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol_version", "client", "examples", "instance", "run", "held_round", "staged_round", "model_round", "previous_session", "previous_received", "software", "previous_counters", "reports_counters")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    HELD_ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGED_ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_ROUND_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SESSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_COUNTERS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_COUNTERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client: int
    examples: int
    instance: int
    run: str
    held_round: int
    staged_round: int
    model_round: int
    previous_session: int
    previous_received: int
    software: str
    previous_counters: Counters
    reports_counters: bool
    def __init__(self, protocol_version: _Optional[int] = ..., client: _Optional[int] = ..., examples: _Optional[int] = ..., instance: _Optional[int] = ..., run: _Optional[str] = ..., held_round: _Optional[int] = ..., staged_round: _Optional[int] = ..., model_round: _Optional[int] = ..., previous_session: _Optional[int] = ..., previous_received: _Optional[int] = ..., software: _Optional[str] = ..., previous_counters: _Optional[_Union[Counters, _Mapping]] = ..., reports_counters: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "run", "session", "schema", "plan", "confirmed_round", "rounds", "heartbeat_seconds", "previous_received", "pending_round", "clients", "address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PENDING_ROUND_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run: str
    session: int
    schema: Schema
    plan: ClientPlan
    confirmed_round: int
    rounds: int
    heartbeat_seconds: float
    previous_received: int
    pending_round: int
    clients: int
    address: str
    def __init__(self, protocol_version: _Optional[int] = ..., run: _Optional[str] = ..., session: _Optional[int] = ..., schema: _Optional[_Union[Schema, _Mapping]] = ..., plan: _Optional[_Union[ClientPlan, _Mapping]] = ..., confirmed_round: _Optional[int] = ..., rounds: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., previous_received: _Optional[int] = ..., pending_round: _Optional[int] = ..., clients: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Schema(_message.Message):
    __slots__ = ("tensors", "hash")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    hash: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., hash: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    kind: TensorKind
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[TensorKind, str]] = ...) -> None: ...

class ClientPlan(_message.Message):
    __slots__ = ("seed", "local_epochs", "batch_size", "learning_rate", "momentum", "weight_decay", "proximal_mu", "keep_ratio", "proxy", "memory_format", "amp", "pack")
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    PROXIMAL_MU_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    AMP_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    seed: int
    local_epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    proximal_mu: float
    keep_ratio: float
    proxy: ProxyPlan
    memory_format: str
    amp: bool
    pack: bool
    def __init__(self, seed: _Optional[int] = ..., local_epochs: _Optional[int] = ..., batch_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ..., proximal_mu: _Optional[float] = ..., keep_ratio: _Optional[float] = ..., proxy: _Optional[_Union[ProxyPlan, _Mapping]] = ..., memory_format: _Optional[str] = ..., amp: bool = ..., pack: bool = ...) -> None: ...

class ProxyPlan(_message.Message):
    __slots__ = ("batches", "batch_size", "keep", "head")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    batches: int
    batch_size: int
    keep: float
    head: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, batches: _Optional[int] = ..., batch_size: _Optional[int] = ..., keep: _Optional[float] = ..., head: _Optional[_Iterable[str]] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("index", "mode", "kept", "format", "length")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    index: int
    mode: Mode
    kept: int
    format: ValueFormat
    length: int
    def __init__(self, index: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., kept: _Optional[int] = ..., format: _Optional[_Union[ValueFormat, str]] = ..., length: _Optional[int] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("schema_hash", "tensors", "length", "checksum", "coding", "base", "content")
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    schema_hash: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    length: int
    checksum: int
    coding: Coding
    base: int
    content: int
    def __init__(self, schema_hash: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., length: _Optional[int] = ..., checksum: _Optional[int] = ..., coding: _Optional[_Union[Coding, str]] = ..., base: _Optional[int] = ..., content: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ModelBroadcast(_message.Message):
    __slots__ = ("round", "transfer")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    round: int
    transfer: Transfer
    def __init__(self, round: _Optional[int] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("round", "score", "signature_round")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    score: float
    signature_round: int
    def __init__(self, round: _Optional[int] = ..., score: _Optional[float] = ..., signature_round: _Optional[int] = ...) -> None: ...

class TrainOrder(_message.Message):
    __slots__ = ("round", "cause")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    round: int
    cause: Cause
    def __init__(self, round: _Optional[int] = ..., cause: _Optional[_Union[Cause, str]] = ...) -> None: ...

class SparseUpdate(_message.Message):
    __slots__ = ("round", "transfer", "steps", "train_loss")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    round: int
    transfer: Transfer
    steps: int
    train_loss: float
    def __init__(self, round: _Optional[int] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., steps: _Optional[int] = ..., train_loss: _Optional[float] = ...) -> None: ...

class ReuseNotice(_message.Message):
    __slots__ = ("round", "source_round", "age", "factor")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ROUND_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    round: int
    source_round: int
    age: int
    factor: float
    def __init__(self, round: _Optional[int] = ..., source_round: _Optional[int] = ..., age: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class RoundClosed(_message.Message):
    __slots__ = ("round", "accepted", "code", "detail")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    round: int
    accepted: bool
    code: Code
    detail: str
    def __init__(self, round: _Optional[int] = ..., accepted: bool = ..., code: _Optional[_Union[Code, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("code", "detail", "round")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    code: Code
    detail: str
    round: int
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., detail: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("protocol_version", "run", "committed", "rounds", "joined", "connected", "phase", "latest", "bytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run: str
    committed: int
    rounds: int
    joined: int
    connected: int
    phase: str
    latest: str
    bytes: _containers.RepeatedCompositeFieldContainer[ByteTotal]
    def __init__(self, protocol_version: _Optional[int] = ..., run: _Optional[str] = ..., committed: _Optional[int] = ..., rounds: _Optional[int] = ..., joined: _Optional[int] = ..., connected: _Optional[int] = ..., phase: _Optional[str] = ..., latest: _Optional[str] = ..., bytes: _Optional[_Iterable[_Union[ByteTotal, _Mapping]]] = ...) -> None: ...

class ByteTotal(_message.Message):
    __slots__ = ("direction", "layer", "bytes")
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    direction: str
    layer: str
    bytes: int
    def __init__(self, direction: _Optional[str] = ..., layer: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
