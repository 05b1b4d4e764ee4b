"""The settings of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd.cache.coding.namespace_codings import EXACT, TierCodec
from prefixd.cache.remote import RemoteOptions


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Settings of a cache.

    Attributes:
        default_ttl_s: lifetime of a lease by default.
        max_ttl_s: longest lifetime of a lease.
        max_sessions: sessions open at once.
        max_grants: leases, reservations and claims of one session at once.
        namespace_bytes: the most memory of namespaces; beyond it the least recently used are forgotten.
        write_back: copy down ahead of need.
        scrub_bytes_per_s: the most that the scrubber reads from disk; 0: no scrubber in the background.
        scrub_every_s: time from the start of one pass of the scrubber to the next.
        write_queue_bytes: blocks that may wait in memory to be written to disk before `reserve` waits; half of the CPU
            tier by default.
        prefetch_bytes: the most bytes of prefetches of one tenant at once; half of the shared tier by default.
        reserved_bytes: the most that one session may have reserved at once; half of the shared tier by default.
        admit_uses: a block is written to disk after this many uses, or if a caller wants it durable.
        disk_codec: how blocks are stored on disk.
        share_after: blocks become common after this many tenants have computed them; 0: never, 1: at once.
        remote: settings of the remote tier, if there is one.
    """

    default_ttl_s: float = 60.0
    max_ttl_s: float = 3600.0
    max_sessions: int = 256
    max_grants: int = 4096
    namespace_bytes: int = 64 << 20
    write_back: bool = True
    scrub_bytes_per_s: int = 0
    scrub_every_s: float = 3600.0
    write_queue_bytes: int | None = None
    prefetch_bytes: int | None = None
    reserved_bytes: int | None = None
    admit_uses: int = 0
    disk_codec: TierCodec = EXACT
    share_after: int = 0
    remote: RemoteOptions = field(default_factory=RemoteOptions)
