from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_CPU: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_CPU: Tier
TIER_DISK: Tier
TIER_REMOTE: Tier

class OpenSessionRequest(_message.Message):
    __slots__ = ("client_name", "pid", "reopens_namespaces")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REOPENS_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    pid: int
    reopens_namespaces: bool
    def __init__(self, client_name: _Optional[str] = ..., pid: _Optional[int] = ..., reopens_namespaces: bool = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("opened", "draining", "undrained")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UNDRAINED_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    draining: SessionDraining
    undrained: SessionUndrained
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., draining: _Optional[_Union[SessionDraining, _Mapping]] = ..., undrained: _Optional[_Union[SessionUndrained, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session_id", "memory_socket", "arena_bytes", "default_ttl_s", "max_ttl_s", "server_version", "tenant")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SOCKET_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_S_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    memory_socket: str
    arena_bytes: int
    default_ttl_s: float
    max_ttl_s: float
    server_version: str
    tenant: str
    def __init__(self, session_id: _Optional[str] = ..., memory_socket: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., default_ttl_s: _Optional[float] = ..., max_ttl_s: _Optional[float] = ..., server_version: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class SessionDraining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionUndrained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Retention(_message.Message):
    __slots__ = ("start_token", "end_token", "priority", "ttl_s")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    end_token: int
    priority: int
    ttl_s: float
    def __init__(self, start_token: _Optional[int] = ..., end_token: _Optional[int] = ..., priority: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("group", "rank", "nbytes", "rule", "shape")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    nbytes: int
    rule: Rule
    shape: PartShape
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., nbytes: _Optional[int] = ..., rule: _Optional[_Union[Rule, _Mapping]] = ..., shape: _Optional[_Union[PartShape, _Mapping]] = ...) -> None: ...

class PartShape(_message.Message):
    __slots__ = ("dtype", "layers", "tokens", "heads", "channels", "order")
    class Axis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        AXIS_UNSPECIFIED: _ClassVar[PartShape.Axis]
        AXIS_LAYER: _ClassVar[PartShape.Axis]
        AXIS_KV: _ClassVar[PartShape.Axis]
        AXIS_TOKEN: _ClassVar[PartShape.Axis]
        AXIS_HEAD: _ClassVar[PartShape.Axis]
        AXIS_CHANNEL: _ClassVar[PartShape.Axis]
    AXIS_UNSPECIFIED: PartShape.Axis
    AXIS_LAYER: PartShape.Axis
    AXIS_KV: PartShape.Axis
    AXIS_TOKEN: PartShape.Axis
    AXIS_HEAD: PartShape.Axis
    AXIS_CHANNEL: PartShape.Axis
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    layers: int
    tokens: int
    heads: int
    channels: int
    order: _containers.RepeatedScalarFieldContainer[PartShape.Axis]
    def __init__(self, dtype: _Optional[str] = ..., layers: _Optional[int] = ..., tokens: _Optional[int] = ..., heads: _Optional[int] = ..., channels: _Optional[int] = ..., order: _Optional[_Iterable[_Union[PartShape.Axis, str]]] = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("full_attention", "sliding_window", "chunked_window", "recurrent_state", "cross_attention", "vision_embedding")
    FULL_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_WINDOW_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_STATE_FIELD_NUMBER: _ClassVar[int]
    CROSS_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    VISION_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    full_attention: FullAttention
    sliding_window: SlidingWindow
    chunked_window: ChunkedWindow
    recurrent_state: RecurrentState
    cross_attention: CrossAttention
    vision_embedding: VisionEmbedding
    def __init__(self, full_attention: _Optional[_Union[FullAttention, _Mapping]] = ..., sliding_window: _Optional[_Union[SlidingWindow, _Mapping]] = ..., chunked_window: _Optional[_Union[ChunkedWindow, _Mapping]] = ..., recurrent_state: _Optional[_Union[RecurrentState, _Mapping]] = ..., cross_attention: _Optional[_Union[CrossAttention, _Mapping]] = ..., vision_embedding: _Optional[_Union[VisionEmbedding, _Mapping]] = ...) -> None: ...

class FullAttention(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlidingWindow(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class ChunkedWindow(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class RecurrentState(_message.Message):
    __slots__ = ("checkpoint_tokens",)
    CHECKPOINT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    checkpoint_tokens: int
    def __init__(self, checkpoint_tokens: _Optional[int] = ...) -> None: ...

class CrossAttention(_message.Message):
    __slots__ = ("image_blocks",)
    IMAGE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    image_blocks: int
    def __init__(self, image_blocks: _Optional[int] = ...) -> None: ...

class VisionEmbedding(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("name", "salt", "dtype", "layout", "block_tokens", "parts", "codec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    salt: bytes
    dtype: str
    layout: str
    block_tokens: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    codec: str
    def __init__(self, name: _Optional[str] = ..., salt: _Optional[bytes] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., codec: _Optional[str] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "session_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    session_id: str
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., session_id: _Optional[str] = ...) -> None: ...

class RegisterNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("pass_s", "token_s", "pair_s")
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    pass_s: float
    token_s: float
    pair_s: float
    def __init__(self, pass_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ...) -> None: ...

class LoadEstimate(_message.Message):
    __slots__ = ("load_s", "compute_s", "best_blocks", "best_s")
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BEST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BEST_S_FIELD_NUMBER: _ClassVar[int]
    load_s: float
    compute_s: float
    best_blocks: int
    best_s: float
    def __init__(self, load_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., best_blocks: _Optional[int] = ..., best_s: _Optional[float] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace_id", "token_ids", "session_id", "counted", "prefill", "asked")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    token_ids: bytes
    session_id: str
    counted: bool
    prefill: Prefill
    asked: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., session_id: _Optional[str] = ..., counted: bool = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., asked: bool = ...) -> None: ...

class TierRun(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    blocks: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("blocks", "runs", "estimate", "claimed")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[TierRun]
    estimate: LoadEstimate
    claimed: ClaimedByOther
    def __init__(self, blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ..., estimate: _Optional[_Union[LoadEstimate, _Mapping]] = ..., claimed: _Optional[_Union[ClaimedByOther, _Mapping]] = ...) -> None: ...

class MatchManyRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "prompts", "prefill")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    prompts: _containers.RepeatedCompositeFieldContainer[PromptToMatch]
    prefill: Prefill
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., prompts: _Optional[_Iterable[_Union[PromptToMatch, _Mapping]]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ...) -> None: ...

class PromptToMatch(_message.Message):
    __slots__ = ("token_ids", "asked")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    asked: bool
    def __init__(self, token_ids: _Optional[bytes] = ..., asked: bool = ...) -> None: ...

class MatchManyResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[MatchResponse]
    def __init__(self, answers: _Optional[_Iterable[_Union[MatchResponse, _Mapping]]] = ...) -> None: ...

class ClaimedByOther(_message.Message):
    __slots__ = ("first_block", "end_block", "prompt_blocks", "age_s", "left_s")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    END_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    end_block: int
    prompt_blocks: int
    age_s: float
    left_s: float
    def __init__(self, first_block: _Optional[int] = ..., end_block: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., age_s: _Optional[float] = ..., left_s: _Optional[float] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids", "ttl_s", "wait_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    ttl_s: float
    wait_s: float
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("claim_id", "first_block", "blocks", "ttl_s", "cached_blocks", "other")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    first_block: int
    blocks: int
    ttl_s: float
    cached_blocks: int
    other: ClaimedByOther
    def __init__(self, claim_id: _Optional[str] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., ttl_s: _Optional[float] = ..., cached_blocks: _Optional[int] = ..., other: _Optional[_Union[ClaimedByOther, _Mapping]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids", "first_block", "max_blocks", "ttl_s", "parts", "uncounted", "prefill", "prefix_blocks", "hits", "found")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    first_block: int
    max_blocks: int
    ttl_s: float
    parts: _containers.RepeatedScalarFieldContainer[int]
    uncounted: bool
    prefill: Prefill
    prefix_blocks: int
    hits: bool
    found: _containers.RepeatedCompositeFieldContainer[TierRun]
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., first_block: _Optional[int] = ..., max_blocks: _Optional[int] = ..., ttl_s: _Optional[float] = ..., parts: _Optional[_Iterable[int]] = ..., uncounted: bool = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., prefix_blocks: _Optional[int] = ..., hits: bool = ..., found: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "first_block", "blocks", "offsets", "ttl_s", "estimate", "cached_blocks", "claimed")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    first_block: int
    blocks: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    ttl_s: float
    estimate: LoadEstimate
    cached_blocks: int
    claimed: ClaimedByOther
    def __init__(self, lease_id: _Optional[str] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., ttl_s: _Optional[float] = ..., estimate: _Optional[_Union[LoadEstimate, _Mapping]] = ..., cached_blocks: _Optional[int] = ..., claimed: _Optional[_Union[ClaimedByOther, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids", "ttl_s", "parts", "first_block")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    ttl_s: float
    parts: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., parts: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_id", "first_block", "blocks", "offsets", "ttl_s")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    first_block: int
    blocks: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    ttl_s: float
    def __init__(self, reservation_id: _Optional[str] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "reservation_id", "blocks", "durable", "retention")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reservation_id: str
    blocks: int
    durable: bool
    retention: _containers.RepeatedCompositeFieldContainer[Retention]
    def __init__(self, session_id: _Optional[str] = ..., reservation_id: _Optional[str] = ..., blocks: _Optional[int] = ..., durable: bool = ..., retention: _Optional[_Iterable[_Union[Retention, _Mapping]]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed", "duplicates", "retention_refused")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_REFUSED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    duplicates: int
    retention_refused: str
    def __init__(self, committed: _Optional[int] = ..., duplicates: _Optional[int] = ..., retention_refused: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PersistRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class PersistResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids", "ttl_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    ttl_s: float
    def __init__(self, session_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    def __init__(self, ttl_s: _Optional[float] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace_id", "token_ids", "session_id")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    token_ids: bytes
    session_id: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., session_id: _Optional[str] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids", "retention")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    retention: _containers.RepeatedCompositeFieldContainer[Retention]
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., retention: _Optional[_Iterable[_Union[Retention, _Mapping]]] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids", "first_block", "max_blocks", "parts", "uncounted", "prefix_blocks", "hits", "found")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    first_block: int
    max_blocks: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    uncounted: bool
    prefix_blocks: int
    hits: bool
    found: _containers.RepeatedCompositeFieldContainer[TierRun]
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., first_block: _Optional[int] = ..., max_blocks: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ..., uncounted: bool = ..., prefix_blocks: _Optional[int] = ..., hits: bool = ..., found: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ...) -> None: ...

class GetHeader(_message.Message):
    __slots__ = ("first_block", "blocks", "sent", "cached_blocks")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: int
    sent: bytes
    cached_blocks: int
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., sent: _Optional[bytes] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("session_id", "namespace_id", "token_ids", "first_block", "parts", "durable", "retention")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    token_ids: bytes
    first_block: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    durable: bool
    retention: _containers.RepeatedCompositeFieldContainer[Retention]
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., first_block: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ..., durable: bool = ..., retention: _Optional[_Iterable[_Union[Retention, _Mapping]]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("committed", "duplicates", "retention_refused")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_REFUSED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    duplicates: int
    retention_refused: str
    def __init__(self, committed: _Optional[int] = ..., duplicates: _Optional[int] = ..., retention_refused: _Optional[str] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class BlockChanges(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[BlockChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[BlockChange, _Mapping]]] = ...) -> None: ...

class BlockChange(_message.Message):
    __slots__ = ("namespace_id", "tier", "stored", "token_ids", "parent", "removed", "cleared")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tier: Tier
    stored: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    parent: int
    removed: _containers.RepeatedScalarFieldContainer[int]
    cleared: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., stored: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., parent: _Optional[int] = ..., removed: _Optional[_Iterable[int]] = ..., cleared: bool = ...) -> None: ...
