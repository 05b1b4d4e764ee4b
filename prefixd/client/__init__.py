"""The client of the prefixd daemon.

`Client` blocks, `AsyncClient` does not; both have the same calls. On the daemon's host, KV bytes are copied once,
through memory that the daemon shares; from other hosts the same calls send them through gRPC.

    with Client() as client:
        cache = client.register(NamespaceSpec("my-model", 16, (PartSpec("full", 0, 2 << 20),)))
        cache.store(tokens, kv)
        blocks = cache.load(tokens, into=kv)
"""

from prefixd.client.connecting.forks import check_not_forked  # isort: skip  # noqa: F401 - before gRPC is imported
from prefixd.base.rules.rules import ChunkedWindow, CrossAttention, RecurrentState, Rule, SlidingWindow, VisionEmbedding
from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.base.tiers import Tier
from prefixd.client.cache import AsyncCache
from prefixd.client.client import AsyncClient
from prefixd.client.connecting.connection import default_address
from prefixd.client.connecting.mapped_arena import Arena
from prefixd.client.connecting.session import NewSession
from prefixd.client.connecting.trace_headers import within_request, within_trace
from prefixd.client.errors import (
    AlreadyExistsError,
    BufferSizeError,
    CallTimeout,
    ClientClosed,
    ClientError,
    ExhaustedError,
    ForkedProcess,
    InvalidArgumentError,
    LeaseLost,
    MemoryUnavailable,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    ServerError,
    ServerUnavailable,
    SocketUntrusted,
    Unauthenticated,
    UnsupportedError,
)
from prefixd.client.inference import (
    Accepted,
    Finished,
    FinishReason,
    GenerateEvent,
    SequenceFinished,
    TokenLogprobs,
    Tokens,
)
from prefixd.client.kv_axes import PartShape
from prefixd.client.memory.leases import AsyncLease, AsyncReservation
from prefixd.client.spec import (
    ClaimedByOther,
    ClaimResult,
    LoadEstimate,
    MatchResult,
    NamespaceSpec,
    PartSpec,
    Prefill,
    Retention,
    StoreResult,
    TierRun,
)
from prefixd.client.sync import Cache, Client, Lease, Reservation

__all__ = [
    "Accepted",
    "AlreadyExistsError",
    "Arena",
    "AsyncCache",
    "AsyncClient",
    "AsyncLease",
    "AsyncReservation",
    "BeamSearch",
    "BufferSizeError",
    "Cache",
    "CallTimeout",
    "ChunkedWindow",
    "ClaimResult",
    "ClaimedByOther",
    "Client",
    "ClientClosed",
    "ClientError",
    "CrossAttention",
    "ExhaustedError",
    "FinishReason",
    "Finished",
    "ForkedProcess",
    "GenerateEvent",
    "InvalidArgumentError",
    "Lease",
    "LeaseLost",
    "LoadEstimate",
    "MatchResult",
    "MemoryUnavailable",
    "NamespaceSpec",
    "NewSession",
    "NotFoundError",
    "PartShape",
    "PartSpec",
    "PermissionDeniedError",
    "PreconditionError",
    "Prefill",
    "RecurrentState",
    "Reservation",
    "Retention",
    "Rule",
    "Sampling",
    "SequenceFinished",
    "ServerError",
    "ServerUnavailable",
    "SlidingWindow",
    "SocketUntrusted",
    "StoreResult",
    "Tier",
    "TierRun",
    "TokenLogprobs",
    "Tokens",
    "Unauthenticated",
    "UnsupportedError",
    "VisionEmbedding",
    "default_address",
    "within_request",
    "within_trace",
]
