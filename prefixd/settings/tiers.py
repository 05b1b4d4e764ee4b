"""The tiers, how blocks move between them, and what is cached: `gpu`, `cpu`, `disk`, `remote`, `transfers`, `cache`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import model_validator as check_together

from prefixd.base.sizes import parse_room
from prefixd.settings.field_types import AbsolutePath, Bytes, BytesOrAuto, Count, Seconds, Section

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("use auto, cpu, cuda or cuda:N")
    return value


def _store_url(value: str) -> str:
    url = urlsplit(value)
    try:
        port = url.port
    except ValueError:
        raise ValueError("the port must be a number from 1 to 65535") from None
    if "@" in url.netloc:
        raise ValueError("leave user and password out of it; set remote.username and remote.password_file")
    if url.query or url.fragment:
        raise ValueError("write it without ? and #")
    match url.scheme:
        case "valkey" if not url.netloc:
            well = url.path.startswith("/") and len(url.path) > 1
        case "valkey" | "valkeys":
            well = bool(url.hostname) and port != 0 and (not url.path.strip("/") or url.path.strip("/").isdecimal())
        case "s3":
            well = bool(url.netloc) and port is None
        case "mooncake":
            well = bool(url.hostname) and port is not None and not url.path.strip("/")
        case _:
            well = False
    if not well:
        raise ValueError(
            "write valkey://host:port (for Redis, too), valkeys://host:port (with TLS), valkey:///path/of/socket, "
            "s3://bucket/prefix or mooncake://host:port"
        )
    return value


def _cpu_size(value: object) -> int:
    if value != "auto":
        return parse_room(value)
    from prefixd_swap.memory_limit import memory_bytes

    return max(memory_bytes() - (256 << 20), 64 << 20) // 2 // 4096 * 4096


class GpuSettings(Section):
    """The GPU tier, which the model beside the daemon works in."""

    bytes: BytesOrAuto = 256 << 20
    """Size of the tier, with a model; without a model there is no GPU tier, and this is 0. On CUDA auto, unless it is
    set: 90% of what the device has free at the start, less an estimate of the model's weights and of what a step takes;
    `prefixd stats` shows what it became. On a CPU auto is most of the machine's memory, taken at the start.
    `prefixd tier resize gpu` changes the size while the daemon runs."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """auto, cpu, cuda or cuda:N; on cpu the tier lives in host memory."""
    chunk_bytes: Bytes | None = None
    """Unit of physical memory; by default 2MiB on CUDA, on a CPU a block's piece."""


class CpuSettings(Section):
    """The CPU tier: one arena of shared memory that local engines map."""

    bytes: Annotated[int, BeforeValidator(_cpu_size)] = 1 << 30
    """Size of the tier. auto: half of what this process may have (the machine's memory, or what its control group
    allows) less 256 MiB."""
    populate: bool = True
    """Touch the arena's pages at the start, in the background, rather than on first use. Pages touched in order lie
    together, and the disk reads and writes them about twice as fast."""
    lock: bool = False
    """Lock the arena's pages into memory (mlock), so that they are never swapped out. Where the limit RLIMIT_MEMLOCK is
    too low, the daemon goes on without and says so."""


class DiskSettings(Section):
    """The disk tier: slab files with a durable index."""

    bytes: Bytes = 8 << 30
    """Size of the tier; 0: none, the cache is then forgotten at a restart."""
    shrink: bool = False
    """Whether the daemon may delete slabs that hold blocks where bytes is below what there is on disk; without it, it
    refuses to start then."""
    path: AbsolutePath | None = None
    """Directory of the tier; by default `blocks` in data_dir."""
    scrub_bytes_per_s: Bytes = 16 << 20
    """The most that the scrubber reads in a second to find damage before a reader does; 0: off. A block below 16 KiB
    counts as 16 KiB."""
    scrub_every_s: Seconds = 3600.0
    """A pass of the scrubber begins this long after the last one began, or when that one is done."""
    io: Literal["mmap", "direct", "buffered"] = "direct"
    """How files are read and written: past the page cache (direct), through it (buffered), or read out of a memory map
    and dropped from the page cache afterwards (mmap). `benchmarks.disk` compares them. What the file system or the
    kernel cannot do is replaced by buffered, with a line of log."""
    io_threads: Annotated[Count, Field(le=256)] = 4
    """Reads or writes of the tier at a time, 256 at most."""
    admit_uses: Annotated[int, Field(ge=0, le=255)] = 0
    """How many times a block has to be asked for again before it is written to disk. 0: every block is written. 1 or
    more saves disk writes: a block that is asked for once stays in memory only, and is gone after a restart. Blocks
    that are stored `durable`, or named in Persist, are written at once."""
    write_queue_bytes: Bytes | None = None
    """Blocks that may wait in memory to be written to disk; above it, Reserve waits for the disk. Tenants share it. By
    default half of cpu.bytes."""


class RemoteSettings(Section):
    """A store that several hosts share, as a tier behind the disk: what one host has computed, all others find.

    See docs/remote.md. Needs `pip install 'prefixd[remote]'`, for Mooncake Store `'prefixd[mooncake]'` too.
    """

    url: Annotated[str, AfterValidator(_store_url)] | None = None
    """Which store: valkey://host:port/db and valkeys://... (with TLS) for Valkey or Redis, valkey:///path for a unix
    socket, s3://bucket/prefix, or mooncake://host:port (of the master). None by default."""
    secret_file: AbsolutePath | None = None
    """File (mode 0600) with the secret that all hosts share which share blocks, 16 bytes or more: `openssl rand -hex 32
    > FILE`. Names of objects and what proves that they are ours are made from it."""
    encryption_key_file: AbsolutePath | None = None
    """File (mode 0600) with a key, 16 bytes or more, the same on all hosts: with it blocks are encrypted in the store.
    """
    share: Literal["all", "reused", "pinned", "none"] = "all"
    """Which blocks are written to the store. all: every one. reused: one that was asked for again. pinned: pinned
    prefixes. none: this host reads only."""
    ttl_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How long the store keeps a block; 0: as long as it likes. Nothing else deletes what other hosts may use."""
    timeout_s: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 1.0
    """How long a call of the store may take, besides what its bytes take at 1 MiB/s. After a call that takes longer
    the store is out of service until it answers again."""
    lookup_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """The most that a prompt waits to learn what the store has of it; for a model of this daemon no more than a twelfth
    of what computing the prompt takes. An answer that comes later is for the next prompt."""
    absent_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """How long the store is not asked again for what it did not have."""
    known_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """How long a block that only the store has is taken to be there while nobody asks for it."""
    known_blocks: Count = 1 << 18
    """The most such blocks; each takes some 300 bytes of memory."""
    connections: Annotated[Count, Field(le=64)] = 4
    """Valkey: connections, of a cluster to each node. Mooncake: calls at a time."""
    cluster: bool = False
    """Valkey: whether the server is a node of a cluster."""
    username: str | None = None
    """Valkey: ACL user; by default the server's default user."""
    password_file: AbsolutePath | None = None
    """Valkey: file (mode 0600) with the password."""
    tls_ca: AbsolutePath | None = None
    """Valkey with TLS: authorities to trust, PEM; by default the system's."""
    tls_cert: AbsolutePath | None = None
    """Valkey with TLS: certificate of this host, PEM, where the server asks for one."""
    tls_key: AbsolutePath | None = None
    """Valkey with TLS: the certificate's private key, PEM."""

    endpoint: str | None = None
    """S3: URL of a server that is not AWS, https://minio.example:9000. Credentials come from the environment, as AWS's
    own tools have it: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of the container or instance."""
    region: str | None = None
    """S3: by default AWS_REGION, else us-east-1."""
    insecure_http: bool = False
    """S3: the endpoint may be http."""
    refresh_s: Seconds = 5.0
    """S3: how often this host looks for what others have written since."""
    hostname: str = "127.0.0.1"
    """Mooncake: by which other hosts reach this one."""
    segment_bytes: Bytes = 0
    """Mooncake: memory that this daemon gives to the store, for objects of all hosts."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Mooncake: how objects travel."""
    device: str = ""
    """Mooncake with rdma: names of devices, separated by commas."""

    @check_together(mode="after")
    def _fits_the_store(self) -> Self:
        if self.url is None:
            if self.model_fields_set - {"url"}:
                name = sorted(self.model_fields_set - {"url"})[0]
                raise ValueError(f"remote.{name} is set, but remote.url is not: there is no shared store; set it too")
            return self
        if self.secret_file is not None and self.secret_file == self.encryption_key_file:
            raise ValueError(
                f"remote.secret_file and remote.encryption_key_file are both {self.secret_file}; make a key of its own"
            )
        if self.secret_file is None:
            raise ValueError(
                f"remote.url = {self.url} needs remote.secret_file; make one with `openssl rand -hex 32 > FILE`, mode "
                "0600, and give all hosts the same"
            )
        scheme = self.url.partition(":")[0]
        for name, schemes in _OF_STORES.items():
            if name in self.model_fields_set and scheme not in schemes:
                if name.startswith("tls_") and scheme == "valkey":
                    raise ValueError(f"remote.{name} needs TLS; write valkeys:// in remote.url = {self.url}")
                raise ValueError(f"remote.{name} is not for {scheme} (remote.url = {self.url}); leave it out")
        if self.endpoint is not None and self.endpoint.startswith("http://") and not self.insecure_http:
            raise ValueError(
                f"remote.endpoint = {self.endpoint} is not encrypted; use https, or set remote.insecure_http = true"
            )
        if self.cluster and urlsplit(self.url).path.strip("/"):
            raise ValueError(
                f"remote.cluster = true, but remote.url = {self.url} names a database or a socket file, which no "
                "cluster has; leave one of them out"
            )
        if self.username is not None and self.password_file is None:
            raise ValueError(f"remote.username = {self.username} needs remote.password_file too")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("remote.tls_cert and remote.tls_key belong together; set both or neither")
        return self


_OF_STORES = {
    "connections": ("valkey", "valkeys", "mooncake"),
    **dict.fromkeys(("cluster", "username", "password_file"), ("valkey", "valkeys")),
    **dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), ("valkeys",)),
    **dict.fromkeys(("endpoint", "region", "insecure_http", "refresh_s"), ("s3",)),
    **dict.fromkeys(("hostname", "segment_bytes", "protocol", "device"), ("mooncake",)),
}
"""Settings of `remote` that are for some stores only, by the URL's scheme."""


class TransferSettings(Section):
    """The order in which blocks move between the tiers."""

    urgency: bool = True
    """What somebody waits for moves before what is brought or written ahead of need; false to measure against."""
    prefetch_bytes: Bytes | None = None
    """The most that one tenant may have on its way ahead of need (Prefetch); what is beyond is left where it is. By
    default half of cpu.bytes."""
    reserved_bytes: Bytes | None = None
    """The most that one session may have reserved at once (Reserve, Put), with what its process may still be writing
    into: a longer reservation is shortened, the next one refused. By default half of cpu.bytes."""


class CacheSettings(Section):
    """Whether blocks are cached, and which are evicted first."""

    enabled: bool = True
    """Whether anything is cached at all; false to measure against."""
    eviction: Literal["lru", "fifo", "random", "lfu", "s3-fifo", "weighing"] = "lru"
    """Which block a full tier evicts first. "lru": the least recently used; for requests that repeat recent prompts.
    "weighing": the block that saves the fewest seconds for each byte that it takes; it learns how soon blocks are asked
    for again, and finds more than lru where many more prompts come back than fit, as in chat. "lfu": the least
    frequently used, with ageing; for few prefixes that stay the same, such as system prompts. "s3-fifo": the oldest
    block that was not asked for again; for many prompts that come once. "fifo" and "random" are for comparison."""
    seed: int = 0
    """Seed of random eviction."""
    write_back: bool = True
    """Copy blocks down ahead of need, so that room is made without waiting."""
    share_after: Annotated[int, Field(ge=0, le=64)] = 0
    """Blocks without a salt become common to all tenants when so many of them have computed them, each for itself.
    Until then nobody can find out by a hit, or by its time, that another has them. 0: never. 1: at once, with no such
    protection. Take more than one party may have tenants. What clients store has to be the same, byte for byte. A
    change begins with an empty cache for what has no salt, and counting begins with the daemon."""
    common_bytes: Bytes | None = None
    """The most that common blocks (of a share_after above 1) may take of the CPU tier, and of the disk tier; those not
    used for longest go first. They count for no tenant's quota. By default a quarter of each tier."""
