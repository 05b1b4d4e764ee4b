"""The settings of the tiers, of transfers and of the cache: `gpu`, `cpu`, `disk`, `remote`, `transfers`, `cache`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import model_validator as check_together

from prefixd.base.codec_names import CodecName
from prefixd.base.sizes import parse_room
from prefixd.settings.field_types import AbsolutePath, Bytes, BytesOrAuto, Count, Seconds, Section, listed_texts

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("use auto, cpu, cuda or cuda:N")
    return value


def _store_url(value: str) -> str:
    for redis, valkey in (("redis://", "valkey://"), ("rediss://", "valkeys://")):  # one protocol, two names
        if value.startswith(redis):
            value = valkey + value.removeprefix(redis)
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
            valid = url.path.startswith("/") and len(url.path) > 1
        case "valkey" | "valkeys":
            valid = bool(url.hostname) and port != 0 and (not url.path.strip("/") or url.path.strip("/").isdecimal())
        case "s3":
            valid = bool(url.netloc) and port is None
        case "mooncake":
            valid = bool(url.hostname) and port is not None and not url.path.strip("/")
        case _:
            valid = False
    if not valid:
        raise ValueError(
            "write valkey://host:port or redis://host:port, valkeys:// or rediss:// (with TLS), "
            "valkey:///path/of/socket, s3://bucket/prefix or mooncake://host:port"
        )
    return value


def _cpu_size(value: object) -> int:
    if value != "auto":
        return parse_room(value)
    from prefixd_swap.memory_limit import memory_bytes

    return max(memory_bytes() - (256 << 20), 64 << 20) // 2 // 4096 * 4096


CodecError = Annotated[float, Field(gt=0, le=1)]
"""The largest relative error of a layer that a lossy codec may make."""


class GpuSettings(Section):
    """The GPU tier: the memory in which the daemon's own model keeps its KV."""

    bytes: BytesOrAuto = 256 << 20
    """Size of the tier, with a model; without a model there is no GPU tier, and this is 0. On CUDA auto, unless it is
    set: 90% of the device's free memory at the start, less an estimate of the model's weights and of the memory of a
    step; `prefixd stats` shows the result. On a CPU auto is most of the machine's memory, allocated at the start.
    `prefixd tier resize gpu` changes the size while the daemon runs."""
    least_bytes: Bytes | None = None
    """Instead of `bytes`: the tier grows when requests want memory, and has so many bytes at the start and when it is
    idle. At least what the smallest request needs; by default that. Guarantees of tenants have to fit it."""
    most_bytes: BytesOrAuto | None = None
    """Instead of `bytes`: the most that such a tier grows to, not more than the device has; requests that need more are
    refused. auto, the default if only `least_bytes` is set: as `bytes` = auto. `prefixd tier resize gpu` changes it
    while the daemon runs."""
    reserve_bytes: Bytes | None = None
    """Of a tier that grows: free memory of the device that it leaves for others. With less it gives back what no
    request needs, so several daemons share a device; give all of them the same. Requests that lack memory may take half
    of it until others have given back. Together with the least it has to fit the device. By default a twentieth of the
    device's memory."""
    idle_s: Seconds = 3.0
    """Of a tier that grows: after so many seconds without a request it shrinks to `least_bytes`. Its blocks go to the
    CPU tier."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """auto, cpu, cuda or cuda:N; with cpu the tier is in host memory."""
    chunk_bytes: Bytes | None = None
    """Unit of physical memory; by default 2MiB on CUDA, and a block's piece on a CPU."""

    @property
    def elastic(self) -> bool:
        """Whether the tier grows and shrinks by itself."""
        return self.least_bytes is not None or self.most_bytes is not None

    @check_together(mode="after")
    def _check_elastic(self) -> Self:
        if not self.elastic:
            for name in ("reserve_bytes", "idle_s"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"gpu.{name} = {value}, but the GPU tier has a fixed size; set gpu.least_bytes or "
                        f"gpu.most_bytes too, or leave gpu.{name} out"
                    )
            return self
        name = "least_bytes" if self.most_bytes is None else "most_bytes"
        if "bytes" in self.model_fields_set:
            raise ValueError(
                f"gpu.bytes = {self.bytes} is a fixed size, and gpu.{name} = {getattr(self, name)} lets the tier grow; "
                "leave one of them out"
            )
        if self.most_bytes == 0:
            raise ValueError("gpu.most_bytes = 0, but a model needs room for its KV; raise it or leave it out")
        if isinstance(self.most_bytes, int) and (self.least_bytes or 0) > self.most_bytes:
            raise ValueError(
                f"gpu.least_bytes = {self.least_bytes} is above gpu.most_bytes = {self.most_bytes}; lower the first or "
                "raise the second"
            )
        return self


class CpuSettings(Section):
    """The CPU tier: one arena of shared memory that local engines map."""

    bytes: Annotated[int, BeforeValidator(_cpu_size)] = 1 << 30
    """Size of the tier. auto: half of the memory that this process may have (the machine's, or the limit of its control
    group) less 256 MiB."""
    populate: bool = True
    """Touch the arena's pages at the start, in the background, rather than on first use. Pages touched in order lie
    together, and the disk reads and writes them about twice as fast."""
    lock: bool = False
    """Lock the arena's pages into memory (mlock), so that they are never swapped out. Where the limit RLIMIT_MEMLOCK is
    too low, the daemon goes on without the lock and reports it."""


class DiskSettings(Section):
    """The disk tier: slab files with a durable index."""

    bytes: Bytes = 8 << 30
    """Size of the tier; 0: there is none, and a restart loses the cache."""
    shrink: bool = False
    """Delete slabs with blocks at the start if the disk has more than `bytes`. Without it the daemon then refuses to
    start."""
    path: AbsolutePath | None = None
    """Directory of the tier; by default `blocks` in data_dir."""
    more_paths: Annotated[tuple[AbsolutePath, ...], BeforeValidator(listed_texts)] = ()
    """Further directories of the tier, each on a drive of its own: every prefix is spread over all, so that one load
    reads from all drives at once. The index stays in `path`. `bytes` counts them all together."""
    drop_missing: bool = False
    """Start without directories of `more_paths` that are gone, and lose the blocks in them. Without it the daemon then
    refuses to start: the drive may not be mounted."""
    encryption_key_file: AbsolutePath | None = None
    """File (mode 0600) with keys, one a line, 16 bytes or more each: `openssl rand -hex 32 > FILE`. The first one
    encrypts what is written to disk from then on, of tenants without a key file of their own; all of them decrypt. To
    replace a key write a new first line, and send SIGHUP; remove the old line when `prefixd doctor` shows no block
    under it. It needs `pip install 'prefixd[encryption]'`. None: blocks are written in clear."""
    scrub_bytes_per_s: Bytes = 16 << 20
    """The most bytes that the scrubber reads in a second, to find damage before a reader does; 0: off. A block below 16
    KiB counts as 16 KiB."""
    scrub_every_s: Seconds = 3600.0
    """A pass of the scrubber begins this many seconds after the last one began, or when the last one is done."""
    io: Literal["mmap", "direct", "buffered"] = "direct"
    """How files are read and written: past the page cache (direct), through it (buffered), or read out of a memory map
    and dropped from the page cache afterwards (mmap). `benchmarks.disk` compares them. If the file system or the kernel
    does not support one, the daemon uses buffered and logs it."""
    io_threads: Annotated[Count, Field(le=256)] = 4
    """Reads or writes of the tier at a time, 256 at most. As many threads encode blocks, but no more than there are
    CPUs: with a codec, a daemon that stores more than they encode (1 to 1.4 GB/s each) waits for them."""
    admit_uses: Annotated[int, Field(ge=0, le=255)] = 0
    """How many times a block must be asked for again before it is written to disk. 0: every block is written. 1 or more
    saves disk writes: a block that is asked for once stays in memory only, and is lost at a restart. Blocks that are
    stored `durable`, or named in Persist, are written at once."""
    endurance_bytes: Bytes | None = None
    """Bytes that the drive stands in its life, as its data sheet says (TBW), for example 1.2PB. Metrics and `prefixd
    stats` then show which part is used up, and how long the rest lasts."""
    wear_start_bytes: Bytes = 0
    """With `endurance_bytes`: bytes that had been written to the drive when this is set, for example 120TB; of an NVMe
    drive `smartctl` shows them as Data Units Written. What daemons write from then on is remembered over restarts."""
    write_queue_bytes: Bytes | None = None
    """The most bytes of blocks that wait in memory to be written to disk; above it, Reserve waits for the disk. Tenants
    share it. By default half of cpu.bytes."""
    codec: CodecName = "exact"
    """How blocks are stored. "exact": byte for byte. The others take less room and are read sooner, and need `pip
    install 'prefixd[codecs]'`. "lossless": they decode to exactly the same bytes. "int8": keys and values in 8 bits,
    half of the bytes of 16 bits; "k8v4": keys in 8 bits, values in 4. The last two alter the model's output a little;
    each block carries the error that was measured when it was written. They are for keys and values whose layout the
    engine states (vLLM, SGLang and prefixd's own worker do); other bytes are stored as with "lossless". A tenant's
    codec comes before this one, and a client's before both. A change counts for blocks that are written afterwards.
    Blocks that a lossy codec has altered are dropped at the start where "exact" or "lossless" counts for them now."""
    codec_error: CodecError | None = None
    """The largest error of a lossy codec: the root mean square of the differences in a layer's keys, relative to that
    of the keys, and likewise of its values; for example 0.01. A block with a larger one is stored without loss. By
    default 0.03 for "int8", which has 0.007 with usual numbers, and 0.2 for "k8v4", which has 0.1: with a bound below
    that all of its blocks are stored without loss."""

    @check_together(mode="after")
    def _check_endurance(self) -> Self:
        if self.endurance_bytes is None and self.wear_start_bytes:
            raise ValueError(
                f"disk.wear_start_bytes = {self.wear_start_bytes} is set, but disk.endurance_bytes is not; set it too"
            )
        if self.endurance_bytes == 0:
            raise ValueError("disk.endurance_bytes = 0; write what the drive stands, such as 1.2PB, or leave it out")
        return self


class RemoteSettings(Section):
    """A store that several hosts share, as a tier behind the disk: every host finds the blocks that another one has
    computed.

    docs/remote.md describes it. It needs `pip install 'prefixd[remote]'`, for Mooncake Store `'prefixd[mooncake]'` too.
    """

    url: Annotated[str, AfterValidator(_store_url)] | None = None
    """The store's address: valkey://host:port/db and valkeys://... (with TLS) for Valkey or Redis (or redis://,
    rediss://), valkey:///path for a unix socket, s3://bucket/prefix, or mooncake://host:port (of the master). None by
    default."""
    secret_file: AbsolutePath | None = None
    """File (mode 0600) with a secret of 16 bytes or more, the same on all hosts that share blocks: `openssl rand -hex
    32 > FILE`. The names of objects, and the proof that they are from one of these hosts, are made from it."""
    encryption_key_file: AbsolutePath | None = None
    """File (mode 0600) with a key of 16 bytes or more, the same on all hosts: it encrypts the blocks in the store."""
    codec: CodecName = "exact"
    """How this host writes blocks to the store and looks for them there, as disk.codec. Give all hosts of a store the
    same: blocks of each codec have names of their own there, which hosts with another codec do not find."""
    codec_error: CodecError | None = None
    """As disk.codec_error. Blocks of each bound have names of their own, too."""
    share: Literal["all", "reused", "pinned", "none"] = "all"
    """Blocks that this host writes to the store. all: every block. reused: blocks that were asked for again. pinned:
    pinned prefixes. none: this host only reads."""
    ttl_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How long the store keeps a block, in seconds; 0: the store decides. prefixd deletes no block that other hosts may
    use."""
    timeout_s: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 1.0
    """How long a call of the store may take, in seconds, in addition to the time of its bytes at 1 MiB/s. After a call
    that takes longer the store is out of service until it answers again."""
    lookup_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """How long a prompt waits until the store says which of the prompt's blocks it has, in seconds; for a model of this
    daemon at most a twelfth of the time that computing the prompt takes. A later answer serves the next prompt."""
    absent_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """For this many seconds the store is not asked again for blocks that it did not have."""
    known_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """For this many seconds after the last request for it, a block that only the store has is expected to be there."""
    known_blocks: Count = 1 << 18
    """The most blocks that are expected in the store only; each takes some 300 bytes of memory."""
    connections: Annotated[Count, Field(le=64)] = 4
    """Valkey: connections, in a cluster to each node. Mooncake: calls at a time."""
    cluster: bool = False
    """Valkey: the server is a node of a cluster."""
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
    """S3: URL of a server that is not AWS, such as https://minio.example:9000. Credentials come from the environment,
    as for AWS's own tools: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of the container or instance."""
    region: str | None = None
    """S3: by default AWS_REGION, else us-east-1."""
    insecure_http: bool = False
    """S3: the endpoint may be http."""
    refresh_s: Seconds = 5.0
    """S3: seconds between two listings in which this host finds objects that others have written."""
    hostname: str = "127.0.0.1"
    """Mooncake: the name by which other hosts reach this one."""
    segment_bytes: Bytes = 0
    """Mooncake: memory that this daemon gives to the store, for objects of all hosts."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Mooncake: the protocol of transfers."""
    device: str = ""
    """Mooncake with rdma: names of devices, separated by commas."""

    @check_together(mode="after")
    def _check_store(self) -> Self:
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
        for name, schemes in _SCHEMES_OF_SETTINGS.items():
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


_SCHEMES_OF_SETTINGS = {
    "connections": ("valkey", "valkeys", "mooncake"),
    **dict.fromkeys(("cluster", "username", "password_file"), ("valkey", "valkeys")),
    **dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), ("valkeys",)),
    **dict.fromkeys(("endpoint", "region", "insecure_http", "refresh_s"), ("s3",)),
    **dict.fromkeys(("hostname", "segment_bytes", "protocol", "device"), ("mooncake",)),
}
"""Settings of `remote` that only some stores have, with the schemes of their URLs."""


class TransferSettings(Section):
    """The order in which blocks move between the tiers."""

    urgency: bool = True
    """Transfer blocks that a request waits for before blocks that are prefetched or written back; false is a baseline
    to measure against."""
    prefetch_bytes: Bytes | None = None
    """The most bytes of one tenant that may be on their way by Prefetch; blocks beyond it stay where they are. By
    default half of cpu.bytes."""
    reserved_bytes: Bytes | None = None
    """The most bytes that one session may have reserved at once (Reserve, Put), including those of ended reservations
    that its process may still write into: a longer reservation is shortened, the next one refused. By default half of
    cpu.bytes."""


class CacheSettings(Section):
    """Caching of blocks, and the order of their eviction."""

    enabled: bool = True
    """Cache blocks; false is a baseline to measure against."""
    eviction: Literal["lru", "fifo", "random", "lfu", "s3-fifo", "weighing"] = "lru"
    """The block that a full tier evicts first. "lru": the least recently used; for requests that repeat recent prompts.
    "weighing": the block that saves the fewest seconds for each byte that it takes; it learns how soon blocks are asked
    for again, and hits more than lru if many more prompts come back than fit, as in chat. "lfu": the least
    frequently used, with ageing; for few prefixes that stay the same, such as system prompts. "s3-fifo": the oldest
    block that was not asked for again; for many prompts that come once. "fifo" and "random" are for comparison."""
    seed: int = 0
    """Seed of random eviction."""
    write_back: bool = True
    """Copy blocks down before the room is needed, so that eviction need not wait for a copy."""
    share_after: Annotated[int, Field(ge=0, le=64)] = 0
    """Blocks without a salt become common to all tenants after this many tenants have computed them, each for itself.
    Until then no tenant can find out by a hit, or by its time, that another tenant has them. 0: never. 1: at once,
    without that protection. Choose more than the number of tenants that one party may have. The bytes that clients
    store must be equal. After a change of this setting the cache of blocks without a salt is empty, and counting starts
    again with each start of the daemon."""
    ghosts: bool = True
    """Estimate, from a sample of the blocks, what tiers of other sizes and other eviction policies would find, for
    `prefixd what-if` and the metrics. It takes at most 1% of the daemon's time."""
    ghosts_bytes: Annotated[Bytes, Field(ge=1 << 20)] = 8 << 20
    """About the most memory of the sample. With more the estimates are surer and cost more time."""
    common_bytes: Bytes | None = None
    """The most bytes of the CPU tier, and of the disk tier, that common blocks (share_after above 1) may take; the
    least recently used go first. They count against no tenant's quota. By default a quarter of each tier."""
