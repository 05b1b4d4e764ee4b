"""Where the daemon listens and who may call it: `server` and `events`."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import model_validator as check_together

from prefixd.base.setting_sources import default_socket
from prefixd.base.tenants import COMMON, check_tenant_name
from prefixd.settings.field_types import (
    AbsolutePath,
    Bytes,
    Count,
    Port,
    Seconds,
    Section,
    SocketPath,
    UserId,
    listed_numbers,
    listed_texts,
)


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


def _socket_mode(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch("0?6[0246][0246]", value):
        raise ValueError('write the mode as an octal string such as "0600", "0660" or "0666"')
    return value.zfill(4)


AnnouncedNames = Annotated[str, AfterValidator(_announced)]


def without_authority(name: str) -> str:
    """Why a setting that names certificates is refused where no client is asked for one."""
    return (
        f"{name} names certificates, but without server.tls_client_ca no client is asked for one; set "
        f"server.tls_client_ca too, or leave {name} out"
    )


class ServerSettings(Section):
    """Where the daemon listens, and what it grants its clients."""

    socket: SocketPath = Field(default_factory=default_socket)
    """Unix socket for clients on this host."""
    socket_mode: Annotated[str, BeforeValidator(_socket_mode)] = "0600"
    """Permissions of the sockets; "0660" lets the socket's group in too, but only this user maps the memory."""
    allow_uids: Annotated[tuple[UserId, ...], BeforeValidator(listed_numbers)] = ()
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
    admin_uids: Annotated[tuple[UserId, ...], BeforeValidator(listed_numbers)] = ()
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
            raise ValueError(without_authority("server.admin_certificates"))
        return self

    @check_together(mode="after")
    def _ttl_within_limit(self) -> Self:
        if self.lease_ttl_s > self.max_lease_ttl_s:
            raise ValueError(
                f"server.lease_ttl_s = {self.lease_ttl_s:g} is above server.max_lease_ttl_s = "
                f"{self.max_lease_ttl_s:g}; lower the first or raise the second"
            )
        return self


class EventSettings(Section):
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
    namespaces: Annotated[tuple[AnnouncedNames, ...], BeforeValidator(listed_texts)] = ("default/*",)
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
