from prefixd.v1 import cache_pb2 as _cache_pb2
from prefixd.v1 import metric_pb2 as _metric_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatsRequest(_message.Message):
    __slots__ = ("last_s",)
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    last_s: float
    def __init__(self, last_s: _Optional[float] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "blocks", "held_blocks", "in_flight_bytes", "hit_tokens", "evicted_blocks", "demoted_blocks", "promoted_blocks", "trouble", "quarantined_bytes", "spare_bytes", "unneeded_bytes", "stranded_bytes", "least_bytes", "most_bytes", "target_bytes", "resized_because", "loaded_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNNEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRANDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIZED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    held_blocks: int
    in_flight_bytes: int
    hit_tokens: int
    evicted_blocks: int
    demoted_blocks: int
    promoted_blocks: int
    trouble: str
    quarantined_bytes: int
    spare_bytes: int
    unneeded_bytes: int
    stranded_bytes: int
    least_bytes: int
    most_bytes: int
    target_bytes: int
    resized_because: str
    loaded_bytes: int
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., demoted_blocks: _Optional[int] = ..., promoted_blocks: _Optional[int] = ..., trouble: _Optional[str] = ..., quarantined_bytes: _Optional[int] = ..., spare_bytes: _Optional[int] = ..., unneeded_bytes: _Optional[int] = ..., stranded_bytes: _Optional[int] = ..., least_bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ..., target_bytes: _Optional[int] = ..., resized_because: _Optional[str] = ..., loaded_bytes: _Optional[int] = ...) -> None: ...

class LabelledCount(_message.Message):
    __slots__ = ("labels", "count")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    count: int
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., count: _Optional[int] = ...) -> None: ...

class LabelledValue(_message.Message):
    __slots__ = ("labels", "value")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    value: float
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "series")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    series: _containers.RepeatedCompositeFieldContainer[HistogramSeries]
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., series: _Optional[_Iterable[_Union[HistogramSeries, _Mapping]]] = ...) -> None: ...

class HistogramSeries(_message.Message):
    __slots__ = ("labels", "counts", "sum", "exemplars")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    EXEMPLARS_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    exemplars: _containers.RepeatedCompositeFieldContainer[Exemplar]
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ..., exemplars: _Optional[_Iterable[_Union[Exemplar, _Mapping]]] = ...) -> None: ...

class Exemplar(_message.Message):
    __slots__ = ("bucket", "value", "trace_id")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    value: float
    trace_id: str
    def __init__(self, bucket: _Optional[int] = ..., value: _Optional[float] = ..., trace_id: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("first_token_s", "between_tokens_s", "queue_s", "lookup_s", "load_s", "save_s", "prefetch_lead_s", "per_token_s", "lease_s")
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_TOKENS_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    SAVE_S_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_LEAD_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    first_token_s: Histogram
    between_tokens_s: Histogram
    queue_s: Histogram
    lookup_s: Histogram
    load_s: Histogram
    save_s: Histogram
    prefetch_lead_s: Histogram
    per_token_s: Histogram
    lease_s: Histogram
    def __init__(self, first_token_s: _Optional[_Union[Histogram, _Mapping]] = ..., between_tokens_s: _Optional[_Union[Histogram, _Mapping]] = ..., queue_s: _Optional[_Union[Histogram, _Mapping]] = ..., lookup_s: _Optional[_Union[Histogram, _Mapping]] = ..., load_s: _Optional[_Union[Histogram, _Mapping]] = ..., save_s: _Optional[_Union[Histogram, _Mapping]] = ..., prefetch_lead_s: _Optional[_Union[Histogram, _Mapping]] = ..., per_token_s: _Optional[_Union[Histogram, _Mapping]] = ..., lease_s: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class TrafficStats(_message.Message):
    __slots__ = ("requests", "generated_tokens", "asked_tokens", "hit_tokens", "stored_bytes")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    generated_tokens: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    asked_tokens: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    hit_tokens: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    stored_bytes: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    def __init__(self, requests: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., generated_tokens: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., asked_tokens: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., hit_tokens: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., stored_bytes: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ...) -> None: ...

class FillStats(_message.Message):
    __slots__ = ("bytes", "blocks")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    bytes: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    blocks: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    def __init__(self, bytes: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ...) -> None: ...

class Period(_message.Message):
    __slots__ = ("seconds", "total", "step_s", "points")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    total: PeriodFigures
    step_s: float
    points: _containers.RepeatedCompositeFieldContainer[PeriodFigures]
    def __init__(self, seconds: _Optional[float] = ..., total: _Optional[_Union[PeriodFigures, _Mapping]] = ..., step_s: _Optional[float] = ..., points: _Optional[_Iterable[_Union[PeriodFigures, _Mapping]]] = ...) -> None: ...

class PeriodFigures(_message.Message):
    __slots__ = ("asked_tokens", "hit_tokens", "requests", "lookups", "generated_tokens", "loaded_bytes", "evicted_blocks", "written_bytes", "first_token_s")
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    asked_tokens: int
    hit_tokens: _containers.RepeatedScalarFieldContainer[int]
    requests: int
    lookups: int
    generated_tokens: int
    loaded_bytes: _containers.RepeatedScalarFieldContainer[int]
    evicted_blocks: _containers.RepeatedScalarFieldContainer[int]
    written_bytes: int
    first_token_s: Quantiles
    def __init__(self, asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Iterable[int]] = ..., requests: _Optional[int] = ..., lookups: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., loaded_bytes: _Optional[_Iterable[int]] = ..., evicted_blocks: _Optional[_Iterable[int]] = ..., written_bytes: _Optional[int] = ..., first_token_s: _Optional[_Union[Quantiles, _Mapping]] = ...) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("count", "p50", "p95", "p99")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50: float
    p95: float
    p99: float
    def __init__(self, count: _Optional[int] = ..., p50: _Optional[float] = ..., p95: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class StoredStats(_message.Message):
    __slots__ = ("codec", "stored_bytes", "exact_bytes", "blocks", "saved_bytes", "refused_parts", "altered_blocks", "largest_error", "rms_error", "encoded_bytes", "encode_s", "decoded_bytes", "decode_s", "dropped_altered_blocks")
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CODEC_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXACT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PARTS_FIELD_NUMBER: _ClassVar[int]
    ALTERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ERROR_FIELD_NUMBER: _ClassVar[int]
    RMS_ERROR_FIELD_NUMBER: _ClassVar[int]
    ENCODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ALTERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    codec: str
    stored_bytes: int
    exact_bytes: int
    blocks: _containers.ScalarMap[str, int]
    saved_bytes: int
    refused_parts: _containers.ScalarMap[str, int]
    altered_blocks: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    largest_error: _containers.RepeatedCompositeFieldContainer[LabelledValue]
    rms_error: _containers.RepeatedCompositeFieldContainer[LabelledValue]
    encoded_bytes: int
    encode_s: float
    decoded_bytes: int
    decode_s: float
    dropped_altered_blocks: int
    def __init__(self, codec: _Optional[str] = ..., stored_bytes: _Optional[int] = ..., exact_bytes: _Optional[int] = ..., blocks: _Optional[_Mapping[str, int]] = ..., saved_bytes: _Optional[int] = ..., refused_parts: _Optional[_Mapping[str, int]] = ..., altered_blocks: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., largest_error: _Optional[_Iterable[_Union[LabelledValue, _Mapping]]] = ..., rms_error: _Optional[_Iterable[_Union[LabelledValue, _Mapping]]] = ..., encoded_bytes: _Optional[int] = ..., encode_s: _Optional[float] = ..., decoded_bytes: _Optional[int] = ..., decode_s: _Optional[float] = ..., dropped_altered_blocks: _Optional[int] = ...) -> None: ...

class DiskWear(_message.Message):
    __slots__ = ("path", "recent_bytes_per_s", "mean_bytes_per_s", "endurance_bytes", "used_ratio", "left_s")
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECENT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ENDURANCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_RATIO_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    path: str
    recent_bytes_per_s: float
    mean_bytes_per_s: float
    endurance_bytes: int
    used_ratio: float
    left_s: float
    def __init__(self, path: _Optional[str] = ..., recent_bytes_per_s: _Optional[float] = ..., mean_bytes_per_s: _Optional[float] = ..., endurance_bytes: _Optional[int] = ..., used_ratio: _Optional[float] = ..., left_s: _Optional[float] = ...) -> None: ...

class BuildInfo(_message.Message):
    __slots__ = ("version", "python", "platform")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    version: str
    python: str
    platform: str
    def __init__(self, version: _Optional[str] = ..., python: _Optional[str] = ..., platform: _Optional[str] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("part", "what", "remedy", "since_s")
    PART_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    part: str
    what: str
    remedy: str
    since_s: float
    def __init__(self, part: _Optional[str] = ..., what: _Optional[str] = ..., remedy: _Optional[str] = ..., since_s: _Optional[float] = ...) -> None: ...

class ScrubStats(_message.Message):
    __slots__ = ("checked_blocks", "checked_bytes", "damaged_blocks", "passes")
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    checked_blocks: int
    checked_bytes: int
    damaged_blocks: int
    passes: int
    def __init__(self, checked_blocks: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., damaged_blocks: _Optional[int] = ..., passes: _Optional[int] = ...) -> None: ...

class WriteBackStats(_message.Message):
    __slots__ = ("queued_blocks", "queued_bytes", "limit_bytes", "written_blocks", "written_bytes", "pushed_back_calls")
    QUEUED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSHED_BACK_CALLS_FIELD_NUMBER: _ClassVar[int]
    queued_blocks: int
    queued_bytes: int
    limit_bytes: int
    written_blocks: int
    written_bytes: int
    pushed_back_calls: int
    def __init__(self, queued_blocks: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., written_blocks: _Optional[int] = ..., written_bytes: _Optional[int] = ..., pushed_back_calls: _Optional[int] = ...) -> None: ...

class RemoteStats(_message.Message):
    __slots__ = ("store", "asked_prompts", "asked_objects", "found_blocks", "remembered_prompts", "unanswered_prompts", "answer_s", "read_bytes", "written_bytes", "shared_blocks", "bad_objects", "failures", "copied_bytes", "known_blocks", "saved_bytes")
    class BadObjectsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STORE_FIELD_NUMBER: _ClassVar[int]
    ASKED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ASKED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BAD_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    store: str
    asked_prompts: int
    asked_objects: int
    found_blocks: int
    remembered_prompts: int
    unanswered_prompts: int
    answer_s: float
    read_bytes: int
    written_bytes: int
    shared_blocks: int
    bad_objects: _containers.ScalarMap[str, int]
    failures: int
    copied_bytes: int
    known_blocks: int
    saved_bytes: int
    def __init__(self, store: _Optional[str] = ..., asked_prompts: _Optional[int] = ..., asked_objects: _Optional[int] = ..., found_blocks: _Optional[int] = ..., remembered_prompts: _Optional[int] = ..., unanswered_prompts: _Optional[int] = ..., answer_s: _Optional[float] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., bad_objects: _Optional[_Mapping[str, int]] = ..., failures: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., known_blocks: _Optional[int] = ..., saved_bytes: _Optional[int] = ...) -> None: ...

class KvEventStats(_message.Message):
    __slots__ = ("events", "batches", "overruns", "subscriptions")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    OVERRUNS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    events: int
    batches: int
    overruns: int
    subscriptions: int
    def __init__(self, events: _Optional[int] = ..., batches: _Optional[int] = ..., overruns: _Optional[int] = ..., subscriptions: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_id", "client_name", "pid", "leases", "reservations", "age_s", "tenant", "stored_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    client_name: str
    pid: int
    leases: int
    reservations: int
    age_s: float
    tenant: str
    stored_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., client_name: _Optional[str] = ..., pid: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., age_s: _Optional[float] = ..., tenant: _Optional[str] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace_id", "namespace", "blocks", "gpu_blocks", "tenant", "worker")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    namespace: _cache_pb2.Namespace
    blocks: int
    gpu_blocks: int
    tenant: str
    worker: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., namespace: _Optional[_Union[_cache_pb2.Namespace, _Mapping]] = ..., blocks: _Optional[int] = ..., gpu_blocks: _Optional[int] = ..., tenant: _Optional[str] = ..., worker: bool = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("state", "pid", "restarts", "running_requests", "model", "device", "block_tokens", "block_tokens_asked", "block_tokens_reason", "shared_bytes", "mapped_blocks", "reused_blocks", "copied_blocks", "error", "kv", "layout", "cuda_graphs", "cuda_graphs_reason", "states", "passes", "passes_read_at_once", "draft", "images", "token_bytes", "token_memory", "operators", "operators_reason", "prompt_graphs", "prompt_graphs_reason")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[WorkerStats.State]
        STATE_NONE: _ClassVar[WorkerStats.State]
        STATE_STARTING: _ClassVar[WorkerStats.State]
        STATE_READY: _ClassVar[WorkerStats.State]
        STATE_FAILED: _ClassVar[WorkerStats.State]
    STATE_UNSPECIFIED: WorkerStats.State
    STATE_NONE: WorkerStats.State
    STATE_STARTING: WorkerStats.State
    STATE_READY: WorkerStats.State
    STATE_FAILED: WorkerStats.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_ASKED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_REASON_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CUDA_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    CUDA_GRAPHS_REASON_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PASSES_READ_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_GRAPHS_REASON_FIELD_NUMBER: _ClassVar[int]
    state: WorkerStats.State
    pid: int
    restarts: int
    running_requests: int
    model: str
    device: str
    block_tokens: int
    block_tokens_asked: int
    block_tokens_reason: str
    shared_bytes: int
    mapped_blocks: int
    reused_blocks: int
    copied_blocks: int
    error: str
    kv: str
    layout: str
    cuda_graphs: bool
    cuda_graphs_reason: str
    states: StateStats
    passes: int
    passes_read_at_once: int
    draft: DraftStats
    images: ImageStats
    token_bytes: int
    token_memory: int
    operators: str
    operators_reason: str
    prompt_graphs: bool
    prompt_graphs_reason: str
    def __init__(self, state: _Optional[_Union[WorkerStats.State, str]] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ..., running_requests: _Optional[int] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_tokens_asked: _Optional[int] = ..., block_tokens_reason: _Optional[str] = ..., shared_bytes: _Optional[int] = ..., mapped_blocks: _Optional[int] = ..., reused_blocks: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., error: _Optional[str] = ..., kv: _Optional[str] = ..., layout: _Optional[str] = ..., cuda_graphs: bool = ..., cuda_graphs_reason: _Optional[str] = ..., states: _Optional[_Union[StateStats, _Mapping]] = ..., passes: _Optional[int] = ..., passes_read_at_once: _Optional[int] = ..., draft: _Optional[_Union[DraftStats, _Mapping]] = ..., images: _Optional[_Union[ImageStats, _Mapping]] = ..., token_bytes: _Optional[int] = ..., token_memory: _Optional[int] = ..., operators: _Optional[str] = ..., operators_reason: _Optional[str] = ..., prompt_graphs: bool = ..., prompt_graphs_reason: _Optional[str] = ...) -> None: ...

class DraftStats(_message.Message):
    __slots__ = ("model", "draft_tokens", "proposed_tokens", "accepted_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    draft_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    def __init__(self, model: _Optional[str] = ..., draft_tokens: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class ImageStats(_message.Message):
    __slots__ = ("asked_images", "encoded_images", "found_images")
    ASKED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    ENCODED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    FOUND_IMAGES_FIELD_NUMBER: _ClassVar[int]
    asked_images: int
    encoded_images: int
    found_images: int
    def __init__(self, asked_images: _Optional[int] = ..., encoded_images: _Optional[int] = ..., found_images: _Optional[int] = ...) -> None: ...

class StateStats(_message.Message):
    __slots__ = ("kept_states", "kept_bytes", "resumed_runs", "resumed_tokens", "runs_without_room")
    KEPT_STATES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESUMED_RUNS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_WITHOUT_ROOM_FIELD_NUMBER: _ClassVar[int]
    kept_states: int
    kept_bytes: int
    resumed_runs: int
    resumed_tokens: int
    runs_without_room: int
    def __init__(self, kept_states: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., resumed_runs: _Optional[int] = ..., resumed_tokens: _Optional[int] = ..., runs_without_room: _Optional[int] = ...) -> None: ...

class SchedulerStats(_message.Message):
    __slots__ = ("policy", "waiting_requests", "finished_requests", "preempted_requests", "resumed_requests", "swapped_requests", "recomputed_requests", "swapped_blocks", "recomputed_tokens", "load_decisions", "cut_loads", "split_loads", "abandoned_loads", "load_spent_s", "load_regret_s", "layerwise_loads")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    CUT_LOADS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_LOADS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_LOADS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SPENT_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_REGRET_S_FIELD_NUMBER: _ClassVar[int]
    LAYERWISE_LOADS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    waiting_requests: int
    finished_requests: int
    preempted_requests: int
    resumed_requests: int
    swapped_requests: int
    recomputed_requests: int
    swapped_blocks: int
    recomputed_tokens: int
    load_decisions: int
    cut_loads: int
    split_loads: int
    abandoned_loads: int
    load_spent_s: float
    load_regret_s: float
    layerwise_loads: int
    def __init__(self, policy: _Optional[str] = ..., waiting_requests: _Optional[int] = ..., finished_requests: _Optional[int] = ..., preempted_requests: _Optional[int] = ..., resumed_requests: _Optional[int] = ..., swapped_requests: _Optional[int] = ..., recomputed_requests: _Optional[int] = ..., swapped_blocks: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., load_decisions: _Optional[int] = ..., cut_loads: _Optional[int] = ..., split_loads: _Optional[int] = ..., abandoned_loads: _Optional[int] = ..., load_spent_s: _Optional[float] = ..., load_regret_s: _Optional[float] = ..., layerwise_loads: _Optional[int] = ...) -> None: ...

class ModelStats(_message.Message):
    __slots__ = ("name", "namespace", "worker", "scheduler", "held_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    worker: WorkerStats
    scheduler: SchedulerStats
    held_bytes: int
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., worker: _Optional[_Union[WorkerStats, _Mapping]] = ..., scheduler: _Optional[_Union[SchedulerStats, _Mapping]] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "uptime_s", "draining", "tiers", "sessions", "namespaces", "leases", "reservations", "worker", "scheduler", "asked_tokens", "hit_tokens", "lost_blocks", "troubles", "scrub", "write_back", "kv_events", "models", "remote", "other_namespaces", "tenants", "namespace_room", "timings", "traffic", "cached", "disk_wear", "build", "period", "claims", "ghosts", "stored", "spans")
    class LostBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ROOM_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    DISK_WEAR_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    GHOSTS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    draining: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    leases: int
    reservations: int
    worker: WorkerStats
    scheduler: SchedulerStats
    asked_tokens: int
    hit_tokens: int
    lost_blocks: _containers.ScalarMap[str, int]
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    scrub: ScrubStats
    write_back: WriteBackStats
    kv_events: KvEventStats
    models: _containers.RepeatedCompositeFieldContainer[ModelStats]
    remote: RemoteStats
    other_namespaces: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    namespace_room: NamespaceRoomStats
    timings: Timings
    traffic: TrafficStats
    cached: FillStats
    disk_wear: DiskWear
    build: BuildInfo
    period: Period
    claims: ClaimStats
    ghosts: GhostStats
    stored: StoredStats
    spans: SpanStats
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., draining: bool = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., worker: _Optional[_Union[WorkerStats, _Mapping]] = ..., scheduler: _Optional[_Union[SchedulerStats, _Mapping]] = ..., asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., lost_blocks: _Optional[_Mapping[str, int]] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ..., scrub: _Optional[_Union[ScrubStats, _Mapping]] = ..., write_back: _Optional[_Union[WriteBackStats, _Mapping]] = ..., kv_events: _Optional[_Union[KvEventStats, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStats, _Mapping]]] = ..., remote: _Optional[_Union[RemoteStats, _Mapping]] = ..., other_namespaces: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., namespace_room: _Optional[_Union[NamespaceRoomStats, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., traffic: _Optional[_Union[TrafficStats, _Mapping]] = ..., cached: _Optional[_Union[FillStats, _Mapping]] = ..., disk_wear: _Optional[_Union[DiskWear, _Mapping]] = ..., build: _Optional[_Union[BuildInfo, _Mapping]] = ..., period: _Optional[_Union[Period, _Mapping]] = ..., claims: _Optional[_Union[ClaimStats, _Mapping]] = ..., ghosts: _Optional[_Union[GhostStats, _Mapping]] = ..., stored: _Optional[_Union[StoredStats, _Mapping]] = ..., spans: _Optional[_Union[SpanStats, _Mapping]] = ...) -> None: ...

class SpanStats(_message.Message):
    __slots__ = ("exported_spans", "failed_spans", "dropped_requests")
    EXPORTED_SPANS_FIELD_NUMBER: _ClassVar[int]
    FAILED_SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    exported_spans: int
    failed_spans: int
    dropped_requests: int
    def __init__(self, exported_spans: _Optional[int] = ..., failed_spans: _Optional[int] = ..., dropped_requests: _Optional[int] = ...) -> None: ...

class ClaimStats(_message.Message):
    __slots__ = ("open", "granted", "waits", "taken_over", "spared_tokens")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    SPARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    open: int
    granted: int
    waits: int
    taken_over: int
    spared_tokens: int
    def __init__(self, open: _Optional[int] = ..., granted: _Optional[int] = ..., waits: _Optional[int] = ..., taken_over: _Optional[int] = ..., spared_tokens: _Optional[int] = ...) -> None: ...

class WhatIfRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class WhatIfResponse(_message.Message):
    __slots__ = ("ghosts", "token_s")
    GHOSTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ghosts: GhostStats
    token_s: float
    def __init__(self, ghosts: _Optional[_Union[GhostStats, _Mapping]] = ..., token_s: _Optional[float] = ...) -> None: ...

class GhostStats(_message.Message):
    __slots__ = ("watched_s", "asked_tokens", "tiers", "skipped_prompts", "busy_s")
    WATCHED_S_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    watched_s: float
    asked_tokens: float
    tiers: _containers.RepeatedCompositeFieldContainer[GhostTier]
    skipped_prompts: int
    busy_s: float
    def __init__(self, watched_s: _Optional[float] = ..., asked_tokens: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[GhostTier, _Mapping]]] = ..., skipped_prompts: _Optional[int] = ..., busy_s: _Optional[float] = ...) -> None: ...

class GhostTier(_message.Message):
    __slots__ = ("tier", "nbytes", "policy", "sampled_share", "references", "sure", "measured_hit_rate", "sizes", "policy_hit_rates", "hit_rates", "tokens_per_byte", "seconds_per_byte")
    class PolicyHitRatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class HitRatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SHARE_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    SURE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    POLICY_HIT_RATES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    nbytes: int
    policy: str
    sampled_share: float
    references: int
    sure: bool
    measured_hit_rate: float
    sizes: _containers.RepeatedCompositeFieldContainer[GhostSize]
    policy_hit_rates: _containers.ScalarMap[str, float]
    hit_rates: _containers.ScalarMap[str, float]
    tokens_per_byte: float
    seconds_per_byte: float
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., nbytes: _Optional[int] = ..., policy: _Optional[str] = ..., sampled_share: _Optional[float] = ..., references: _Optional[int] = ..., sure: bool = ..., measured_hit_rate: _Optional[float] = ..., sizes: _Optional[_Iterable[_Union[GhostSize, _Mapping]]] = ..., policy_hit_rates: _Optional[_Mapping[str, float]] = ..., hit_rates: _Optional[_Mapping[str, float]] = ..., tokens_per_byte: _Optional[float] = ..., seconds_per_byte: _Optional[float] = ...) -> None: ...

class GhostSize(_message.Message):
    __slots__ = ("factor", "nbytes", "hit_rate", "margin", "filled")
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    factor: float
    nbytes: int
    hit_rate: float
    margin: float
    filled: bool
    def __init__(self, factor: _Optional[float] = ..., nbytes: _Optional[int] = ..., hit_rate: _Optional[float] = ..., margin: _Optional[float] = ..., filled: bool = ...) -> None: ...

class RecordTraceRequest(_message.Message):
    __slots__ = ("duration_s",)
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    duration_s: float
    def __init__(self, duration_s: _Optional[float] = ...) -> None: ...

class RecordedRequests(_message.Message):
    __slots__ = ("requests", "dropped_requests", "done")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    dropped_requests: int
    done: bool
    def __init__(self, requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping]]] = ..., dropped_requests: _Optional[int] = ..., done: bool = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("arrival_s", "prompt_tokens", "output_tokens", "hashes")
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arrival_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class NamespaceRoomStats(_message.Message):
    __slots__ = ("used_bytes", "limit_bytes", "forgotten_namespaces", "refused_namespaces")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    limit_bytes: int
    forgotten_namespaces: int
    refused_namespaces: int
    def __init__(self, used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., forgotten_namespaces: _Optional[int] = ..., refused_namespaces: _Optional[int] = ...) -> None: ...

class TierQuota(_message.Message):
    __slots__ = ("tier", "guaranteed_bytes", "most_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    guaranteed_bytes: int
    most_bytes: int
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., guaranteed_bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("tiers", "sessions", "grants", "namespaces", "waiting_requests", "requests_per_s", "calls", "retained_bytes")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierQuota]
    sessions: int
    grants: int
    namespaces: int
    waiting_requests: int
    requests_per_s: float
    calls: int
    retained_bytes: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierQuota, _Mapping]]] = ..., sessions: _Optional[int] = ..., grants: _Optional[int] = ..., namespaces: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., requests_per_s: _Optional[float] = ..., calls: _Optional[int] = ..., retained_bytes: _Optional[int] = ...) -> None: ...

class TenantTierUse(_message.Message):
    __slots__ = ("tier", "used_bytes", "held_bytes", "exact_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXACT_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    used_bytes: int
    held_bytes: int
    exact_bytes: int
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., used_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., exact_bytes: _Optional[int] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("name", "quota", "tiers", "sessions", "grants", "namespaces", "waiting_requests", "running_requests", "calls", "retained_bytes", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota: TenantQuota
    tiers: _containers.RepeatedCompositeFieldContainer[TenantTierUse]
    sessions: int
    grants: int
    namespaces: int
    waiting_requests: int
    running_requests: int
    calls: int
    retained_bytes: int
    refused: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[TenantQuota, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TenantTierUse, _Mapping]]] = ..., sessions: _Optional[int] = ..., grants: _Optional[int] = ..., namespaces: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., calls: _Optional[int] = ..., retained_bytes: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WhyRequest(_message.Message):
    __slots__ = ("request_id", "last", "calls")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    last: int
    calls: bool
    def __init__(self, request_id: _Optional[str] = ..., last: _Optional[int] = ..., calls: bool = ...) -> None: ...

class WhyResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("id", "client_id", "trace_id", "kind", "method", "tenant", "model", "arrived_unix_s", "age_s", "handed_over_s", "first_token_s", "ended_s", "outcome", "status", "reason", "sequences", "prompt_tokens", "output_tokens", "blocks", "found", "used", "stages", "stages_left_out", "waits", "missing", "decisions", "preempted", "preempted_for", "restarts", "degraded", "uncached", "cause", "sentence", "cause_s", "altered_blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FOR_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_S_FIELD_NUMBER: _ClassVar[int]
    ALTERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    client_id: str
    trace_id: str
    kind: str
    method: str
    tenant: str
    model: str
    arrived_unix_s: float
    age_s: float
    handed_over_s: float
    first_token_s: float
    ended_s: float
    outcome: str
    status: str
    reason: str
    sequences: int
    prompt_tokens: int
    output_tokens: int
    blocks: int
    found: _containers.RepeatedCompositeFieldContainer[TierTokens]
    used: _containers.RepeatedCompositeFieldContainer[TierTokens]
    stages: _containers.RepeatedCompositeFieldContainer[StageInfo]
    stages_left_out: int
    waits: _containers.RepeatedCompositeFieldContainer[WaitInfo]
    missing: MissingInfo
    decisions: _containers.RepeatedCompositeFieldContainer[LoadDecision]
    preempted: int
    preempted_for: _containers.RepeatedScalarFieldContainer[str]
    restarts: int
    degraded: _containers.RepeatedScalarFieldContainer[str]
    uncached: bool
    cause: str
    sentence: str
    cause_s: float
    altered_blocks: int
    def __init__(self, id: _Optional[str] = ..., client_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., kind: _Optional[str] = ..., method: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., arrived_unix_s: _Optional[float] = ..., age_s: _Optional[float] = ..., handed_over_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., outcome: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., sequences: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., found: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., used: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StageInfo, _Mapping]]] = ..., stages_left_out: _Optional[int] = ..., waits: _Optional[_Iterable[_Union[WaitInfo, _Mapping]]] = ..., missing: _Optional[_Union[MissingInfo, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[LoadDecision, _Mapping]]] = ..., preempted: _Optional[int] = ..., preempted_for: _Optional[_Iterable[str]] = ..., restarts: _Optional[int] = ..., degraded: _Optional[_Iterable[str]] = ..., uncached: bool = ..., cause: _Optional[str] = ..., sentence: _Optional[str] = ..., cause_s: _Optional[float] = ..., altered_blocks: _Optional[int] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ("tier", "tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    tokens: int
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class StageInfo(_message.Message):
    __slots__ = ("name", "start_s", "end_s", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_s: float
    end_s: float
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WaitInfo(_message.Message):
    __slots__ = ("reason", "seconds", "later")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    seconds: float
    later: bool
    def __init__(self, reason: _Optional[str] = ..., seconds: _Optional[float] = ..., later: bool = ...) -> None: ...

class MissingInfo(_message.Message):
    __slots__ = ("found_blocks", "missing_blocks", "block_tokens", "difference", "evictions", "looked_for", "other_namespace", "other_tenant", "other_differs")
    FOUND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FOR_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OTHER_TENANT_FIELD_NUMBER: _ClassVar[int]
    OTHER_DIFFERS_FIELD_NUMBER: _ClassVar[int]
    found_blocks: int
    missing_blocks: int
    block_tokens: int
    difference: TokenDifference
    evictions: _containers.RepeatedCompositeFieldContainer[Eviction]
    looked_for: int
    other_namespace: str
    other_tenant: str
    other_differs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, found_blocks: _Optional[int] = ..., missing_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., difference: _Optional[_Union[TokenDifference, _Mapping]] = ..., evictions: _Optional[_Iterable[_Union[Eviction, _Mapping]]] = ..., looked_for: _Optional[int] = ..., other_namespace: _Optional[str] = ..., other_tenant: _Optional[str] = ..., other_differs: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenDifference(_message.Message):
    __slots__ = ("token", "block", "expected_id", "actual_id", "expected_text", "actual_text", "equal_tokens", "compared_tokens")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ID_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TEXT_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    EQUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token: int
    block: int
    expected_id: int
    actual_id: int
    expected_text: str
    actual_text: str
    equal_tokens: int
    compared_tokens: int
    def __init__(self, token: _Optional[int] = ..., block: _Optional[int] = ..., expected_id: _Optional[int] = ..., actual_id: _Optional[int] = ..., expected_text: _Optional[str] = ..., actual_text: _Optional[str] = ..., equal_tokens: _Optional[int] = ..., compared_tokens: _Optional[int] = ...) -> None: ...

class Eviction(_message.Message):
    __slots__ = ("blocks", "before_s", "tier", "reason", "tenant", "by")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    before_s: float
    tier: _cache_pb2.Tier
    reason: str
    tenant: str
    by: str
    def __init__(self, blocks: _Optional[int] = ..., before_s: _Optional[float] = ..., tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., reason: _Optional[str] = ..., tenant: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class LoadDecision(_message.Message):
    __slots__ = ("at_s", "blocks", "tier", "load_s", "compute_s", "by_setting")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BY_SETTING_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    blocks: int
    tier: _cache_pb2.Tier
    load_s: float
    compute_s: float
    by_setting: bool
    def __init__(self, at_s: _Optional[float] = ..., blocks: _Optional[int] = ..., tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., load_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., by_setting: bool = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("name", "quota", "unlimited")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota: TenantQuota
    unlimited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[TenantQuota, _Mapping]] = ..., unlimited: _Optional[_Iterable[str]] = ...) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ("namespace_id", "limit", "page_token", "order")
    class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ORDER_LAST_USE: _ClassVar[ListPrefixesRequest.Order]
        ORDER_SIZE: _ClassVar[ListPrefixesRequest.Order]
        ORDER_HITS: _ClassVar[ListPrefixesRequest.Order]
    ORDER_LAST_USE: ListPrefixesRequest.Order
    ORDER_SIZE: ListPrefixesRequest.Order
    ORDER_HITS: ListPrefixesRequest.Order
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    limit: int
    page_token: bytes
    order: ListPrefixesRequest.Order
    def __init__(self, namespace_id: _Optional[bytes] = ..., limit: _Optional[int] = ..., page_token: _Optional[bytes] = ..., order: _Optional[_Union[ListPrefixesRequest.Order, str]] = ...) -> None: ...

class GroupInfo(_message.Message):
    __slots__ = ("names", "parts", "rule", "block_bytes", "blocks")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    parts: int
    rule: str
    block_bytes: int
    blocks: int
    def __init__(self, names: _Optional[_Iterable[str]] = ..., parts: _Optional[int] = ..., rule: _Optional[str] = ..., block_bytes: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class PrefixStorage(_message.Message):
    __slots__ = ("stored_bytes", "exact_bytes", "coded_blocks", "altered_blocks", "largest_error", "rms_error")
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXACT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALTERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ERROR_FIELD_NUMBER: _ClassVar[int]
    RMS_ERROR_FIELD_NUMBER: _ClassVar[int]
    stored_bytes: int
    exact_bytes: int
    coded_blocks: int
    altered_blocks: int
    largest_error: float
    rms_error: float
    def __init__(self, stored_bytes: _Optional[int] = ..., exact_bytes: _Optional[int] = ..., coded_blocks: _Optional[int] = ..., altered_blocks: _Optional[int] = ..., largest_error: _Optional[float] = ..., rms_error: _Optional[float] = ...) -> None: ...

class PartErrors(_message.Message):
    __slots__ = ("part", "codec", "largest_errors", "rms_errors")
    PART_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ERRORS_FIELD_NUMBER: _ClassVar[int]
    RMS_ERRORS_FIELD_NUMBER: _ClassVar[int]
    part: int
    codec: str
    largest_errors: _containers.RepeatedScalarFieldContainer[float]
    rms_errors: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, part: _Optional[int] = ..., codec: _Optional[str] = ..., largest_errors: _Optional[_Iterable[float]] = ..., rms_errors: _Optional[_Iterable[float]] = ...) -> None: ...

class BlockStorage(_message.Message):
    __slots__ = ("stored_bytes", "form", "altered_in_memory", "largest_error", "rms_error", "parts", "unread")
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    ALTERED_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ERROR_FIELD_NUMBER: _ClassVar[int]
    RMS_ERROR_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    stored_bytes: int
    form: str
    altered_in_memory: bool
    largest_error: float
    rms_error: float
    parts: _containers.RepeatedCompositeFieldContainer[PartErrors]
    unread: str
    def __init__(self, stored_bytes: _Optional[int] = ..., form: _Optional[str] = ..., altered_in_memory: bool = ..., largest_error: _Optional[float] = ..., rms_error: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[PartErrors, _Mapping]]] = ..., unread: _Optional[str] = ...) -> None: ...

class PrefixInfo(_message.Message):
    __slots__ = ("key", "namespace_id", "namespace_name", "blocks", "tokens", "nbytes", "gpu_blocks", "cpu_blocks", "disk_blocks", "remote_blocks", "idle_s", "pinned", "held", "groups", "tenant", "hits", "model", "storage")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    key: str
    namespace_id: bytes
    namespace_name: str
    blocks: int
    tokens: int
    nbytes: int
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    remote_blocks: int
    idle_s: float
    pinned: bool
    held: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupInfo]
    tenant: str
    hits: int
    model: str
    storage: PrefixStorage
    def __init__(self, key: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., namespace_name: _Optional[str] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., nbytes: _Optional[int] = ..., gpu_blocks: _Optional[int] = ..., cpu_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., remote_blocks: _Optional[int] = ..., idle_s: _Optional[float] = ..., pinned: bool = ..., held: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupInfo, _Mapping]]] = ..., tenant: _Optional[str] = ..., hits: _Optional[int] = ..., model: _Optional[str] = ..., storage: _Optional[_Union[PrefixStorage, _Mapping]] = ...) -> None: ...

class FindPrefixRequest(_message.Message):
    __slots__ = ("text", "token_ids", "model", "namespace_id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    model: str
    namespace_id: bytes
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., model: _Optional[str] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class FindPrefixResponse(_message.Message):
    __slots__ = ("key", "tokens", "prompt_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: str
    tokens: int
    prompt_tokens: int
    def __init__(self, key: _Optional[str] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "total", "next_page_token", "pinned_blocks", "pinned_bytes")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixInfo]
    total: int
    next_page_token: bytes
    pinned_blocks: int
    pinned_bytes: int
    def __init__(self, prefixes: _Optional[_Iterable[_Union[PrefixInfo, _Mapping]]] = ..., total: _Optional[int] = ..., next_page_token: _Optional[bytes] = ..., pinned_blocks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("key", "token_ids", "namespace_id", "namespace", "tenant")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    key: str
    token_ids: bytes
    namespace_id: bytes
    namespace: _cache_pb2.Namespace
    tenant: str
    def __init__(self, key: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., namespace: _Optional[_Union[_cache_pb2.Namespace, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("blocks", "found", "brought", "left")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    found: _containers.RepeatedCompositeFieldContainer[_cache_pb2.TierRun]
    brought: int
    left: int
    def __init__(self, blocks: _Optional[int] = ..., found: _Optional[_Iterable[_Union[_cache_pb2.TierRun, _Mapping]]] = ..., brought: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("key", "first_block", "limit", "text", "layers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    key: str
    first_block: int
    limit: int
    text: bool
    layers: bool
    def __init__(self, key: _Optional[str] = ..., first_block: _Optional[int] = ..., limit: _Optional[int] = ..., text: bool = ..., layers: bool = ...) -> None: ...

class TierGroups(_message.Message):
    __slots__ = ("tier", "groups")
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("index", "key", "tiers", "children", "pinned", "held", "nbytes", "token_ids", "there", "priority", "priority_s", "text", "storage")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    key: str
    tiers: _containers.RepeatedScalarFieldContainer[_cache_pb2.Tier]
    children: int
    pinned: bool
    held: int
    nbytes: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    there: _containers.RepeatedCompositeFieldContainer[TierGroups]
    priority: int
    priority_s: float
    text: str
    storage: BlockStorage
    def __init__(self, index: _Optional[int] = ..., key: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[_cache_pb2.Tier, str]]] = ..., children: _Optional[int] = ..., pinned: bool = ..., held: _Optional[int] = ..., nbytes: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., there: _Optional[_Iterable[_Union[TierGroups, _Mapping]]] = ..., priority: _Optional[int] = ..., priority_s: _Optional[float] = ..., text: _Optional[str] = ..., storage: _Optional[_Union[BlockStorage, _Mapping]] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("prefix", "blocks")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixInfo
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, prefix: _Optional[_Union[PrefixInfo, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("blocks", "durable", "reason")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    durable: bool
    reason: str
    def __init__(self, blocks: _Optional[int] = ..., durable: bool = ..., reason: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("blocks", "durable", "reason")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    durable: bool
    reason: str
    def __init__(self, blocks: _Optional[int] = ..., durable: bool = ..., reason: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("key", "namespace_id", "all", "shared")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    key: str
    namespace_id: bytes
    all: bool
    shared: bool
    def __init__(self, key: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., all: bool = ..., shared: bool = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted_blocks", "kept_blocks", "total_blocks", "done")
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    kept_blocks: int
    total_blocks: int
    done: bool
    def __init__(self, evicted_blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., done: bool = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("blocks", "nbytes", "left_blocks", "left_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    nbytes: int
    left_blocks: int
    left_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., nbytes: _Optional[int] = ..., left_blocks: _Optional[int] = ..., left_bytes: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("shutdown",)
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    shutdown: bool
    def __init__(self, shutdown: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("written_blocks", "finished_requests")
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    written_blocks: int
    finished_requests: int
    def __init__(self, written_blocks: _Optional[int] = ..., finished_requests: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("was_draining",)
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    was_draining: bool
    def __init__(self, was_draining: bool = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DamagedBlock(_message.Message):
    __slots__ = ("key", "namespace_id", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    namespace_id: bytes
    reason: str
    def __init__(self, key: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("checked_blocks", "total_blocks", "checked_bytes", "damaged_blocks", "dropped_blocks", "altered_blocks", "damaged", "done")
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALTERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    checked_blocks: int
    total_blocks: int
    checked_bytes: int
    damaged_blocks: int
    dropped_blocks: int
    altered_blocks: int
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedBlock]
    done: bool
    def __init__(self, checked_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., damaged_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., altered_blocks: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[DamagedBlock, _Mapping]]] = ..., done: bool = ...) -> None: ...

class ResizeTierRequest(_message.Message):
    __slots__ = ("tier", "nbytes", "wait_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.Tier
    nbytes: int
    wait_s: float
    def __init__(self, tier: _Optional[_Union[_cache_pb2.Tier, str]] = ..., nbytes: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ResizeTierResponse(_message.Message):
    __slots__ = ("before_bytes", "target_bytes", "nbytes", "evicted_blocks", "demoted_blocks", "done", "unfinished")
    BEFORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    before_bytes: int
    target_bytes: int
    nbytes: int
    evicted_blocks: int
    demoted_blocks: int
    done: bool
    unfinished: str
    def __init__(self, before_bytes: _Optional[int] = ..., target_bytes: _Optional[int] = ..., nbytes: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., demoted_blocks: _Optional[int] = ..., done: bool = ..., unfinished: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("owner", "blocks")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    blocks: int
    def __init__(self, owner: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class DiskKey(_message.Message):
    __slots__ = ("key", "blocks", "nbytes", "encrypts", "settings")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    key: str
    blocks: int
    nbytes: int
    encrypts: bool
    settings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., blocks: _Optional[int] = ..., nbytes: _Optional[int] = ..., encrypts: bool = ..., settings: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("violations", "blocks", "slots", "sessions", "leases", "reservations", "troubles", "holders", "disk_keys")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    DISK_KEYS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    slots: int
    sessions: int
    leases: int
    reservations: int
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    disk_keys: _containers.RepeatedCompositeFieldContainer[DiskKey]
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ..., slots: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., disk_keys: _Optional[_Iterable[_Union[DiskKey, _Mapping]]] = ...) -> None: ...
