"""The configuration: one typed tree with defaults that work.

A value comes from, in this order: a flag of the command line, a `PREFIXD_*` environment variable
(`PREFIXD_CPU__BYTES=8GiB`), `prefixd.toml`, the default below. There is no other way to set one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import model_validator as check_together

from prefixd.base.errors import ConfigError
from prefixd.base.sizes import parse_room
from prefixd.base.tenants import COMMON, QUOTA_TIERS, Quota, TierQuota, check_guarantees, check_tenant_name
from prefixd.settings.sources import ANY_NAME, gather_layers, is_known
from prefixd_scheduler import POLICIES

# The socket that hands over the CPU tier's memory lies beside the daemon's, under its name and this.
MEMORY_SOCKET_SUFFIX = "-memory"
# sun_path of sockaddr_un has 108 bytes, the last of which is a NUL.
LONGEST_SOCKET_PATH = 107 - len(MEMORY_SOCKET_SUFFIX)

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("use auto, cpu, cuda or cuda:N")
    return value


def _tcp(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write host:port, such as 127.0.0.1:7070 (port 0: any free one)")
    return value


EVENT_NAMESPACE, EVENT_TENANT = "{namespace}", "{tenant}"
"""Stand in `events.topic` for the name of the namespace that a batch is about, and for its tenant."""


def _zmq(value: str) -> str:
    if not re.fullmatch(r"tcp://[^/]+:\d{1,5}|ipc://.+", value):
        raise ValueError("write tcp://host:port, tcp://*:port or ipc:///path")
    return value


def _topic(value: str) -> str:
    if set("{}") & set(value.replace(EVENT_NAMESPACE, "").replace(EVENT_TENANT, "")):
        raise ValueError(f"only {EVENT_NAMESPACE} and {EVENT_TENANT} can stand in braces")
    return value


def _announced(value: str) -> str:
    tenant, slash, name = value.partition("/")
    if not (tenant and slash and name):
        raise ValueError("write TENANT/NAME, such as default/* or team-a/llama-*")
    if tenant != COMMON:
        check_tenant_name(tenant)
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


def _socket_mode(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch("0?6[0246][0246]", value):
        raise ValueError('write the mode as an octal string such as "0600", "0660" or "0666"')
    return value.zfill(4)


def _numbers(value: object) -> object:
    """A list as it stands in a variable or behind --set: 1001,1002."""
    if isinstance(value, int):
        raise ValueError(f"write a list such as [{value}]")
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _texts(value: object) -> object:
    """A list as it stands in a variable or behind --set: /models/a,/models/b."""
    return [text.strip() for text in value.split(",") if text.strip()] if isinstance(value, str) else value


def _absolute(value: Path) -> Path:
    return Path(os.path.abspath(value.expanduser()))


def _socket(value: Path) -> Path:
    value = _absolute(value)
    length = len(os.fsencode(value))
    if length > LONGEST_SOCKET_PATH:
        raise ValueError(f"the socket's path may have at most {LONGEST_SOCKET_PATH} bytes and has {length}; shorten it")
    return value


def _size_or_auto(value: object) -> int | str:
    return value if value == "auto" else parse_room(value)


def _cpu_size(value: object) -> int:
    if value != "auto":
        return parse_room(value)
    from prefixd_swap.memory_limit import memory_bytes

    return max(memory_bytes() - (256 << 20), 64 << 20) // 2 // 4096 * 4096


_MOST_REQUESTS = 1_000_000
_COMMON_PART = 4


def _count_or_auto(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_REQUESTS:
        raise ValueError(f"give a whole number from 0 to {_MOST_REQUESTS:,}, or auto")
    return value


Bytes = Annotated[int, BeforeValidator(parse_room)]
BytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
AnnouncedNames = Annotated[str, AfterValidator(_announced)]
SocketPath = Annotated[Path, AfterValidator(_socket)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
UserId = Annotated[int, Field(ge=0, le=(1 << 32) - 2)]


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/prefixd`, else `~/.local/share/prefixd`."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "prefixd"


def default_socket() -> Path:
    """`$XDG_RUNTIME_DIR/prefixd/prefixd.sock`, else `/tmp/prefixd-<uid>/prefixd.sock`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "prefixd" if runtime else Path(f"/tmp/prefixd-{os.getuid()}")
    return directory / "prefixd.sock"


def _without_authority(name: str) -> str:
    return (
        f"{name} names certificates, but without server.tls_client_ca no client is asked for one; set "
        f"server.tls_client_ca too, or leave {name} out"
    )


class _Section(BaseModel):
    # The docstring below a field is its description: `config show --describe` prints it.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class ServerSettings(_Section):
    """Where the daemon listens, and what it grants its clients."""

    socket: SocketPath = Field(default_factory=default_socket)
    """Unix socket for clients on this host."""
    socket_mode: Annotated[str, BeforeValidator(_socket_mode)] = "0600"
    """Permissions of the sockets; "0660" lets the socket's group in too, but only this user maps the memory."""
    allow_uids: Annotated[tuple[UserId, ...], BeforeValidator(_numbers)] = ()
    """Further users, by id, who may use the daemon and map its memory; by an access control list on the sockets."""
    tcp: Annotated[str, AfterValidator(_tcp)] | None = None
    """host:port for clients on other hosts; none by default. Needs tls_cert and tls_key, or insecure_tcp."""
    tls_cert: AbsolutePath | None = None
    """Certificate (chain) of the TCP port, PEM. With it and tls_key nobody reads along, and clients can check whom they
    talk to. Who may use the port is up to tls_client_ca and tokens: with neither, everyone who reaches it."""
    tls_key: AbsolutePath | None = None
    """The certificate's private key, PEM, without a password."""
    tls_client_ca: AbsolutePath | None = None
    """Authorities, PEM: only clients with a certificate of theirs may use the TCP port (mutual TLS). To which tenant a
    certificate belongs is said by tenants.NAME.certificates, and who is an operator by admin_certificates; with tokens,
    other certificates need a token besides."""
    insecure_tcp: bool = False
    """Open the TCP port without TLS, on loopback too: everyone who reaches it may use it as a client, and what travels
    can be read and changed on the way. With tokens only their holders may use it, but the tokens can be read on the way
    too."""
    tokens: AbsolutePath | None = None
    """File (mode 0600) of bearer tokens for the TCP port and the metrics port: lines `name role token [tenant]`, and
    comments that begin with `#`. The role client opens PrefixCache and Inference, metrics the metrics port, admin those
    and Admin; health is open to all. Without a tenant a token is of the tenant default. The daemon reads the file again
    within 2 s of a change; while it cannot be used, the tokens read before stay valid."""
    admin_uids: Annotated[tuple[UserId, ...], BeforeValidator(_numbers)] = ()
    """Users of this host, by id, who are operators at the unix socket, beside root and the daemon's user: they use
    Admin and map the memory. Everybody else who is let in there is a client."""
    admin_certificates: tuple[str, ...] = ()
    """Names in client certificates (subject's common name, or a DNS or URI alternative name) of operators: they use
    Admin over TCP. See tls_client_ca."""
    max_sessions: Count = 256
    """Sessions open at once; one more is refused. Some are kept for each tenant (8, where there are enough), however
    many the others open; `sessions` of a tenant is a limit of its own."""
    max_grants: Count = 4096
    """Leases and reservations of one session at once; one more is refused."""
    namespace_bytes: Annotated[Bytes, Field(ge=1 << 16)] = 64 << 20
    """Memory for namespaces (a model and a salt each), some 2.5 KiB each. When it is used up, those that were not used
    for longest are forgotten with their blocks. Where all are in use (leased, pinned, running), a client is refused one
    more, and requests with one more salt run without the cache."""
    lease_ttl_s: Seconds = 60.0
    """How long a lease or a reservation lives unless its client asks otherwise."""
    max_lease_ttl_s: Seconds = 3600.0
    """The longest life a client can ask for."""
    drain_timeout_s: Seconds = 60.0
    """How long a drain or a SIGTERM waits for running requests before it ends them."""
    metrics_port: Port | None = None
    """Port for Prometheus metrics on 127.0.0.1; none by default. With tokens, scrapers need one with the role metrics
    or admin (`authorization` in Prometheus' scrape_config); without, every user of this host can read the figures."""
    audit_log: AbsolutePath | None = None
    """File for a line of JSON about everyone who was let in or refused, and what operators did; none by default."""

    @check_together(mode="after")
    def _tcp_is_secure_or_says_so(self) -> Self:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"server.{name} = {getattr(self, name)} needs server.{other} too")
        if self.tcp is None:
            return self
        if self.tls_cert is not None and self.insecure_tcp:
            raise ValueError(
                f"server.insecure_tcp = true and server.tls_cert = {self.tls_cert} contradict each other; keep one"
            )
        if self.tls_cert is None and not self.insecure_tcp:
            raise ValueError(
                f"server.tcp = {self.tcp} has no TLS; set server.tls_cert and server.tls_key, or "
                "server.insecure_tcp = true to do without, for everyone who reaches the port"
            )
        return self

    @check_together(mode="after")
    def _certificates_are_asked_for(self) -> Self:
        if self.admin_certificates and self.tls_client_ca is None:
            raise ValueError(_without_authority("server.admin_certificates"))
        return self

    @check_together(mode="after")
    def _ttl_within_limit(self) -> Self:
        if self.lease_ttl_s > self.max_lease_ttl_s:
            raise ValueError(
                f"server.lease_ttl_s = {self.lease_ttl_s:g} is above server.max_lease_ttl_s = "
                f"{self.max_lease_ttl_s:g}; lower the first or raise the second"
            )
        return self


class GpuSettings(_Section):
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


class CpuSettings(_Section):
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


class DiskSettings(_Section):
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


class RemoteSettings(_Section):
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


class TransferSettings(_Section):
    """The order in which blocks move between the tiers."""

    urgency: bool = True
    """What somebody waits for moves before what is brought or written ahead of need; false to measure against."""
    prefetch_bytes: Bytes | None = None
    """The most that one tenant may have on its way ahead of need (Prefetch); what is beyond is left where it is. By
    default half of cpu.bytes."""
    reserved_bytes: Bytes | None = None
    """The most that one session may have reserved at once (Reserve, Put), with what its process may still be writing
    into: a longer reservation is shortened, the next one refused. By default half of cpu.bytes."""


class CacheSettings(_Section):
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


class EventSettings(_Section):
    """KV events, by which cache-aware routers see what each tier holds; over ZMQ and msgpack, as vLLM publishes them.

    Whoever can connect reads the token ids and the salts of what is announced.
    """

    endpoint: Annotated[str, AfterValidator(_zmq)] | None = None
    """Where routers subscribe, such as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/prefixd/events; none by
    default, and nothing is published."""
    connect: bool = False
    """Connect to the endpoint rather than listen there: for routers that listen themselves."""
    replay_endpoint: Annotated[str, AfterValidator(_zmq)] | None = None
    """Where subscribers that missed batches ask for them once more."""
    block_tokens: Count = 16
    """Tokens of a block as routers count them: the engine's block size, vLLM's and both sides' default. A block of the
    cache is told of as several such blocks; one of a size that cannot be divided so is told of as it is."""
    topic: Annotated[str, AfterValidator(_topic)] = ""
    """The first frame of every message, empty as vLLM's by default; {namespace} in it stands for the namespace's name,
    {tenant} for whose it is. llm-d wants kv@POD@MODEL, where POD is its name for the engine to which it sends requests
    for what is held here, such as 10.0.0.5:8000, and MODEL the one that requests name."""
    namespaces: Annotated[tuple[AnnouncedNames, ...], BeforeValidator(_texts)] = ("default/*",)
    """Whose namespaces are announced, besides those that the daemon's own workers fill: TENANT/NAME each, where * and ?
    in NAME stand for any characters. A client names its namespaces as it likes, so name only tenants whose word routers
    may take: a router sends traffic where a tenant says that a model's prefixes are. (common)/NAME: what has become
    common by cache.share_after. Several tenants need {tenant} in the topic."""
    again_s: Seconds = 5.0
    """Everything is announced anew for a new subscriber, but begins at most once in so many seconds, and takes at most
    a tenth of the time."""
    buffer_batches: Count = 10_000
    """Batches kept for replay, at the most."""
    buffer_bytes: Bytes = 64 << 20
    """Bytes that the batches kept for replay may take; the oldest go first."""
    queue_batches: Count = 4096
    """Batches that may wait for one subscriber (up to about 100 KiB each); one that is further behind misses some."""

    @check_together(mode="after")
    def _endpoints_fit(self) -> Self:
        for name in ("replay_endpoint", "connect"):
            if self.endpoint is None and getattr(self, name):
                value = str(getattr(self, name)).lower()
                raise ValueError(f"events.{name} = {value} needs events.endpoint too")
        if self.endpoint is not None and self.endpoint == self.replay_endpoint:
            raise ValueError(f"events.endpoint and events.replay_endpoint are both {self.endpoint}; choose two")
        tenants = sorted({pattern.partition("/")[0] for pattern in self.namespaces})
        if self.endpoint is not None and len(tenants) > 1 and EVENT_TENANT not in self.topic:
            raise ValueError(
                f"events.namespaces names the tenants {', '.join(tenants)}, and events.topic = {self.topic!r} does not "
                f"tell them apart: one could claim to hold the other's prefixes; put {EVENT_TENANT} into the topic"
            )
        return self


class SchedulerSettings(_Section):
    """The order of the queue."""

    policy: Literal["fcfs", "fpf", "relaxed-fpf", "lpm", "shortest-ready", "deadline"] = "relaxed-fpf"
    """Which of the waiting requests with the lowest priority number runs next. fcfs: the one that arrived first. fpf:
    the one whose cached prefix is in the nearest tier. relaxed-fpf: as fpf, but a request's age counts too, so that no
    wait is without bound. lpm: the one with most cached tokens. shortest-ready: the one with the least time left to
    load and compute its prompt. deadline: the one whose deadline comes first. All but fcfs and relaxed-fpf may starve a
    request."""
    starvation_bound_s: Seconds | None = None
    """For the policies that may starve a request: a request that has waited this long runs before all that have not.
    If at most L requests wait at a time and one starts at least every s seconds, no request waits longer than
    starvation_bound_s + L * s."""
    look_ahead: CountOrAuto = "auto"
    """How many waiting requests get their prefixes loaded before their turn. auto: as many as start while one prefix is
    loaded, by recent measurements. 0: none. A number is for comparison."""
    queue_limit: Count = 4096
    """Requests that may wait; one more is refused."""
    load: Literal["auto", "always", "never"] = "auto"
    """What happens to a cached prefix that is not in GPU memory. auto: what brings the first token soonest, by measured
    times: load it, compute it again, or load its end while its beginning is computed; a load that is slower than
    expected is abandoned. always: load it, however long that takes. never: compute it again. The last two are for
    comparison."""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    """What happens to the KV of a running request that is preempted because GPU memory is short. swap: it moves down a
    tier and is loaded again later. recompute: it is dropped and computed again. auto: whichever takes less time, for
    each request. Without a tier below the GPU tier, and with cache.enabled = false, it is always computed again."""

    @check_together(mode="after")
    def _bound_for_who_starves(self) -> Self:
        if self.starvation_bound_s is not None and not POLICIES[self.policy].may_starve:
            raise ValueError(
                f"scheduler.starvation_bound_s = {self.starvation_bound_s:g}, but scheduler.policy = {self.policy} "
                "starves nobody; leave the bound out"
            )
        return self


class WorkerSettings(_Section):
    """The inference worker beside the daemon; there is one when `model` or `embedded` is set."""

    model: AbsolutePath | None = None
    """Directory of a Hugging Face model."""
    more_models: Annotated[tuple[AbsolutePath, ...], BeforeValidator(_texts)] = ()
    """Directories of further models, each with a worker of its own; all settings of this section apply to each. They
    share the GPU tier, frame by frame: whoever is busy has the memory. A request names a model by its directory's name;
    without a name it goes to `model`."""
    embedded: bool = False
    """Run the small random model that comes with prefixd: for trying out and for tests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV; auto: what the model was saved in, float32 on a CPU."""
    block_tokens: Count = 16
    """Tokens of one cached block; more where a block must fill whole chunks of memory, see `prefixd stats`."""
    layout: Literal["token", "layer"] = "token"
    """How KV lies in memory: all layers of a token together, or each layer apart."""
    kv: Literal["virtual", "paged"] = "virtual"
    """How the worker finds a request's KV: in contiguous addresses on which its blocks are mapped (virtual; vTensor,
    vAttention), or in blocks behind a table (paged; PagedAttention), as a baseline to measure against."""
    groups: Literal["by_rule", "one"] = "by_rule"
    """What is kept of models whose layers need different things: of each layer what its rule needs (by_rule; Jenga), or
    everything of all, in pages of one size (one), as a baseline to measure against: layers with windows keep
    all tokens, blocks are as long as the largest state, and a state is kept after each of them."""
    feature_bytes: Bytes = 256 << 20
    """For models that read images: size of the embeddings of images seen before that the worker keeps on its device.
    What the layers with cross-attention of Llama 3.2 Vision keep of an image is in the tiers: 202 MiB of its 11B."""
    draft_model: AbsolutePath | None = None
    """Directory of a small Hugging Face model with the same tokens that proposes output, which the model checks several
    tokens at a time: the same answers in fewer passes of the model (speculative decoding). It runs on the same device,
    and its KV lies in the same blocks. For models of attention layers, with kv = "virtual" and layout = "token"."""
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """How many tokens the draft proposes at a time."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs: on CUDA, with 16-bit KV in virtual tensors and a model that a graph can hold;
    `prefixd stats` says where they are not in use and why."""
    max_running: Count = 8
    """Requests computed at once; on CUDA 64, unless it is set."""
    max_step_tokens: Count = 512
    """Tokens computed in one step over all requests; on CUDA 4096, unless it is set. Those that run wait for their next
    token while a step of a long prompt is computed: 40 ms for 1000 tokens of an 8B on an H100."""
    states_per_prompt: Annotated[int, Field(ge=0, le=64)] = 4
    """For models with recurrent layers: most states that are kept of one prompt: at its end, where it leaves what
    others have sent, and as state_every_tokens says. One more is kept at the end of the output. A state has the memory
    of hundreds of tokens' KV and serves prefixes of one length. 0: none; nothing of such a model is found again."""
    state_every_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Among these, one each so many tokens of a prompt, in whole blocks, the last ones first; 0: none."""
    images_per_prompt: Count = 16
    """For models that read images: images of one prompt. A call to Generate has at most 16 MiB with all of them."""
    image_bytes: Bytes = 8 << 20
    """Size of an image's file (PNG, JPEG, WebP)."""
    image_pixels: Count = 16 << 20
    """Width times height of an image; an image that is decoded takes 4 bytes for each."""
    image_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """Processor time to decode an image and to resize it for the model, which is done in a process of its own; one that
    takes more is refused. A photograph of 16 million pixels takes one."""
    images_bytes: Bytes = 1 << 30
    """Size of the images of all requests that wait or run, of their files and of their pixels as the model takes them;
    one more is refused."""
    threads: Count = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPU threads of the worker."""
    step_seconds: Annotated[int, Field(ge=1)] = 600
    """The longest that a step of the worker may take. A worker that answers nothing for that long hangs: it is killed,
    and another one is started."""
    restart_limit: Annotated[int, Field(ge=0)] = 3
    """How often a worker that died is started again before the daemon gives it up."""

    @property
    def enabled(self) -> bool:
        """Whether there is a worker."""
        return self.embedded or self.model is not None

    @check_together(mode="after")
    def _one_model(self) -> Self:
        if self.embedded and self.model is not None:
            raise ValueError(f"worker.embedded and worker.model = {self.model} are both set; keep one of them")
        if self.draft_model is not None:
            if not self.enabled:
                raise ValueError(
                    f"worker.draft_model = {self.draft_model} has no model to propose tokens to; set worker.model too"
                )
            for name, needed in (("kv", "virtual"), ("layout", "token")):
                if (value := getattr(self, name)) != needed:
                    raise ValueError(
                        f'worker.draft_model = {self.draft_model} needs worker.{name} = "{needed}", not "{value}"'
                    )
        if self.more_models and not self.enabled:
            raise ValueError("worker.more_models needs worker.model too; name the first model there")
        if self.more_models and self.draft_model is not None:
            raise ValueError(
                f"worker.draft_model = {self.draft_model} is for a single model; leave it or worker.more_models out"
            )
        if self.more_models and self.layout != "token":
            raise ValueError(f"worker.layout = {self.layout} is for a single model; with worker.more_models use token")
        if self.max_step_tokens < self.block_tokens:
            raise ValueError(
                f"worker.max_step_tokens = {self.max_step_tokens} is below worker.block_tokens = "
                f"{self.block_tokens}; a step must hold at least one block"
            )
        return self


class TenantSettings(_Section):
    """`[tenants.NAME]`: who belongs to a tenant, and how much of the daemon it may have.

    Read again on SIGHUP. A tenant within what it is guaranteed of a tier loses no block there for another's sake.
    """

    uids: Annotated[tuple[UserId, ...], BeforeValidator(_numbers)] = ()
    """Users of this host, by id, who belong to it; let in at the unix socket, but not to the memory."""
    map_memory: bool = False
    """Whether these users may map the memory: whoever does can read and write all tenants' blocks."""
    certificates: tuple[str, ...] = ()
    """Names in client certificates (subject's common name, or a DNS or URI alternative name) that belong to it."""
    gpu_guaranteed: Bytes = 0
    """Bytes of the GPU tier below which none of its blocks goes for another tenant's sake."""
    gpu_most: Bytes | None = None
    """The most bytes of the GPU tier that its blocks may have. With more, after it was lowered, it loses its own blocks
    as it stores more."""
    cpu_guaranteed: Bytes = 0
    """As gpu_guaranteed, of the CPU tier."""
    cpu_most: Bytes | None = None
    """As gpu_most, of the CPU tier; its reservations count."""
    disk_guaranteed: Bytes = 0
    """As gpu_guaranteed, of the disk tier."""
    disk_most: Bytes | None = None
    """As gpu_most, of the disk tier."""
    sessions: Count | None = None
    """Sessions open at once."""
    grants: Count | None = None
    """Leases and reservations at once."""
    namespaces: Count | None = None
    """Namespaces (a model and a salt each) that are open in a session or have blocks."""
    waiting_requests: Count | None = None
    """Requests that wait in the queue."""
    requests_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Calls of Generate a second."""
    calls: Count | None = None
    """Calls under way at once; Generate, which has waiting_requests, and the streams of sessions do not count."""
    retained_bytes: Bytes | None = None
    """Bytes of blocks with a priority above 0, for which its clients may ask; without it, all tenants together may have
    half of this host's tiers."""

    @property
    def quota(self) -> Quota:
        """What of this is its quota."""
        return Quota(
            tiers=tuple(
                TierQuota(getattr(self, f"{tier}_guaranteed"), getattr(self, f"{tier}_most")) for tier in QUOTA_TIERS
            ),
            sessions=self.sessions,
            grants=self.grants,
            namespaces=self.namespaces,
            waiting_requests=self.waiting_requests,
            requests_per_s=self.requests_per_s,
            calls=self.calls,
            retained_bytes=self.retained_bytes,
        )


class Settings(_Section):
    """Everything that can be configured."""

    data_dir: AbsolutePath = Field(default_factory=default_data_dir)
    """Directory for what must outlive the daemon."""
    server: ServerSettings = Field(default_factory=ServerSettings)
    gpu: GpuSettings = Field(default_factory=GpuSettings)
    cpu: CpuSettings = Field(default_factory=CpuSettings)
    disk: DiskSettings = Field(default_factory=DiskSettings)
    remote: RemoteSettings = Field(default_factory=RemoteSettings)
    transfers: TransferSettings = Field(default_factory=TransferSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    tenants: dict[Annotated[str, AfterValidator(check_tenant_name)], TenantSettings] = Field(default_factory=dict)
    """Tenants by name, each a section [tenants.NAME] of the file; those that no section names have no quotas."""

    @check_together(mode="after")
    def _blocks_become_common_somewhere(self) -> Self:
        if self.cache.share_after > 1 and not self.cpu.bytes:
            raise ValueError(
                f"cache.share_after = {self.cache.share_after}, but blocks become common in the CPU tier, and there is "
                "none (cpu.bytes = 0); raise cpu.bytes, or set cache.share_after to 0 or 1"
            )
        return self

    def on_device(self, device: str) -> Self:
        """With the defaults of the model's device, such as "cuda:0", for what is not set."""
        if not device.startswith("cuda"):
            return self
        sections: dict[str, dict[str, object]] = {
            "gpu": {"bytes": "auto"},
            "worker": {"max_running": 64, "max_step_tokens": 4096},
        }
        update = {}
        for name, defaults in sections.items():
            section = getattr(self, name)
            unset = {each: value for each, value in defaults.items() if each not in section.model_fields_set}
            update[name] = section.model_copy(update=unset)
        return self.model_copy(update=update)

    @property
    def quotas(self) -> dict[str, Quota]:
        """Quotas by tenant, and that of common blocks."""
        quotas = {name: tenant.quota for name, tenant in self.tenants.items()}
        if self.cache.share_after > 1:
            quotas[COMMON] = Quota(tiers=(TierQuota(), *map(self._common, (self.cpu.bytes, self.disk.bytes))))
        return quotas

    def _common(self, tier_bytes: int) -> TierQuota:
        most = self.cache.common_bytes
        return TierQuota(most_bytes=tier_bytes // _COMMON_PART if most is None else most)

    @check_together(mode="after")
    def _gpu_tier_is_the_workers(self) -> Self:
        if self.worker.enabled:
            if not self.gpu.bytes:
                raise ValueError("gpu.bytes = 0, but a model needs room for its KV; leave gpu.bytes out or raise it")
            return self
        if "bytes" not in self.gpu.model_fields_set:
            # Frozen for everyone else; here the value is still being made.
            object.__setattr__(self, "gpu", self.gpu.model_copy(update={"bytes": 0}))
        elif self.gpu.bytes:
            raise ValueError(
                f"gpu.bytes = {self.gpu.bytes}, but without a model there is no GPU tier; "
                "set worker.model or worker.embedded, or leave gpu.bytes out"
            )
        return self

    @check_together(mode="after")
    def _tenants_fit(self) -> Self:  # after the check above, which says that there is no GPU tier
        for tier in QUOTA_TIERS:
            for name, tenant in self.tenants.items():
                least, most = getattr(tenant, f"{tier}_guaranteed"), getattr(tenant, f"{tier}_most")
                if most is not None and least > most:
                    raise ValueError(
                        f"tenants.{name}.{tier}_guaranteed = {least} is above tenants.{name}.{tier}_most = {most}; "
                        "lower the first or raise the second"
                    )
            if (size := getattr(self, tier).bytes) != "auto":
                larger = (
                    "" if tier != "gpu" or self.worker.enabled else "set worker.model: without it there is no GPU tier"
                )
                check_guarantees(self.quotas, tier, size, larger)
        for name, tenant in self.tenants.items():
            if tenant.certificates and self.server.tls_client_ca is None:
                raise ValueError(_without_authority(f"tenants.{name}.certificates"))
            if tenant.map_memory and not tenant.uids:
                raise ValueError(
                    f"tenants.{name}.map_memory = true is about the users in tenants.{name}.uids, and there are none; "
                    "name them, or leave map_memory out"
                )
        for kind in ("uids", "certificates"):
            owners: dict[object, str] = {}
            for name, tenant in self.tenants.items():
                for each in getattr(tenant, kind):
                    if owners.setdefault(each, name) != name:
                        raise ValueError(
                            f"tenants.{name}.{kind} has {each!r}, which tenants.{owners[each]} has, too; keep one"
                        )
        return self

    @property
    def disk_path(self) -> Path:
        """Where the disk tier lives."""
        return self.disk.path or self.data_dir / "blocks"

    @classmethod
    def load(
        cls,
        config_file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """The effective settings.

        `overrides` (flags) may be nested (`{"cpu": {"bytes": "1GiB"}}`) or dotted (`{"cpu.bytes": "1GiB"}`);
        `environ` is the process's environment unless given. Raises ConfigError with one line.
        """
        return cls.load_with_sources(config_file, overrides, environ)[0]

    @classmethod
    def load_with_sources(
        cls,
        config_file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> tuple[Self, dict[str, str]]:
        """As `load`, and where each setting that is not a default comes from, by dotted name."""
        known = dotted_names()
        values, sources = gather_layers(known, config_file, overrides or {}, os.environ if environ is None else environ)
        try:
            return cls.model_validate(values), sources
        except ValidationError as error:
            raise ConfigError(_one_line(error, known, sources)) from error


_TENANTS = "tenants"


def dotted_names(section: type[BaseModel] = Settings, prefix: str = "") -> dict[str, str]:
    """Every setting's dotted name, with its description; `tenants.NAME.cpu_most` stands for that of any tenant."""
    names: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names |= dotted_names(field.annotation, f"{prefix}{name}.")
        elif name == _TENANTS:
            names |= dotted_names(TenantSettings, f"{name}.{ANY_NAME}.")
        else:
            names[prefix + name] = field.description or ""
    return names


def dotted_values(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Every setting's value by dotted name, in the order of declaration."""
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            values |= dotted_values(value, f"{prefix}{name}.")
        elif name == _TENANTS:
            for tenant, its in value.items():
                values |= dotted_values(its, f"{name}.{tenant}.")
        else:
            values[prefix + name] = value
    return values


def _one_line(error: ValidationError, known: Mapping[str, str], sources: Mapping[str, str]) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    name = ".".join(part for part in first["loc"] if isinstance(part, str) and part != "[key]")  # a number: in a list
    source = f" (set by {sources[name]})" if name in sources else ""
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "literal_error":
        line = f"{name} = {first['input']!r}: use {first['ctx']['expected']}{source}"
    elif is_known(name, known) or "[key]" in first["loc"]:
        line = f"{name} = {str(first['input'])!r}: {message}{source}"
    else:
        # Settings that contradict each other: the message names them.
        line = message
    line = re.sub(r"://[^/@\s]*@", "://...@", line)  # a password in a URL is not for the log
    return line if len(problems) == 1 else f"{line} (and {len(problems) - 1} more)"
