"""The settings `server`, `tracing` and `events`: where the daemon listens, and which callers it lets in."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import model_validator as check_together

from prefixd.base.setting_sources import default_socket
from prefixd.base.tenancy.tenants import COMMON, check_tenant_name
from prefixd.settings.field_types import (
    AbsolutePath,
    Bytes,
    Count,
    Seconds,
    Section,
    SocketPath,
    UserId,
    listed_numbers,
    listed_texts,
)
from prefixd.settings.http_address import HttpAddress


def _tcp(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write host:port, such as 127.0.0.1:7070 (port 0: any free one)")
    return value


def _http_address(value: str) -> str:
    HttpAddress.parse(value)
    return value


EVENT_NAMESPACE, EVENT_TENANT = "{namespace}", "{tenant}"
"""Stand in `events.topic` for the name of a batch's namespace, and for the namespace's tenant."""


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


HttpAddressText = Annotated[str, AfterValidator(_http_address)]


def without_authority(name: str) -> str:
    """Returns why a setting that names certificates is refused if the daemon asks no client for one."""
    return (
        f"{name} names certificates, but without server.tls_client_ca no client is asked for one; set "
        f"server.tls_client_ca too, or leave {name} out"
    )


class ServerSettings(Section):
    """The daemon's listeners, and limits of its clients."""

    socket: SocketPath = Field(default_factory=default_socket)
    """Unix socket for clients on this host."""
    socket_mode: Annotated[str, BeforeValidator(_socket_mode)] = "0600"
    """Permissions of the sockets. "0660" gives access to the socket's group too, but only this user maps the memory."""
    allow_uids: Annotated[tuple[UserId, ...], BeforeValidator(listed_numbers)] = ()
    """Ids of further users that may use the daemon and map its memory, by an access control list on the sockets."""
    tcp: Annotated[str, AfterValidator(_tcp)] | None = None
    """host:port for clients on other hosts; none by default. Needs tls_cert and tls_key, or insecure_tcp."""
    tls_cert: AbsolutePath | None = None
    """Certificate (chain) of the TCP port and of HTTP ports with https://, PEM. With it and tls_key, traffic is
    encrypted and clients can verify the daemon. tls_client_ca and tokens decide which clients may use the port; with
    neither, all that reach it may."""
    tls_key: AbsolutePath | None = None
    """The certificate's private key, PEM, without a password."""
    tls_client_ca: AbsolutePath | None = None
    """Certificate authorities, PEM: only clients with a certificate from them may use the TCP port (mutual TLS).
    tenants.NAME.certificates says which tenant a certificate belongs to, admin_certificates which ones are operators';
    if there are tokens, all other certificates need a token too. At an HTTP port with https:// a token alone is enough,
    and /healthz and /readyz need neither."""
    insecure_tcp: bool = False
    """Open the TCP port without TLS, also on loopback: all clients that reach it may use it, and others can read and
    change the traffic on the way. With tokens only their holders may use it, but the tokens can be read on the way."""
    tokens: AbsolutePath | None = None
    """File (mode 0600; of root with the daemon's group: 0440) of bearer tokens for the TCP port and the HTTP ports:
    lines `name role token [tenant]`, and comments that begin with `#`. The role client opens PrefixCache and
    Inference, metrics the figures, admin those and Admin; health is open to all. A token without a tenant belongs to
    the tenant default. The daemon reads the file again within 2 s of a change; while it cannot be used, the tokens
    read before stay valid."""
    admin_uids: Annotated[tuple[UserId, ...], BeforeValidator(listed_numbers)] = ()
    """User ids of this host that are operators at the unix socket, beside root and the daemon's user: they use Admin
    and map the memory. All other users that may connect are clients."""
    admin_certificates: tuple[str, ...] = ()
    """Names in client certificates (subject's common name, or a DNS or URI alternative name) of operators: they use
    Admin over TCP, and read the figures. Needs tls_client_ca."""
    metrics_certificates: tuple[str, ...] = ()
    """Names in client certificates of Prometheus and others that may read the figures, at an HTTP port with https://.
    Needs tls_client_ca."""
    max_sessions: Count = 256
    """The most sessions open at once; one more is refused. The daemon keeps some for each tenant (8, if there are
    enough), so that the others cannot take all; `sessions` of a tenant is a limit of its own."""
    max_grants: Count = 4096
    """The most leases, reservations and claims of one session at once; one more is refused."""
    namespace_bytes: Annotated[Bytes, Field(ge=1 << 16)] = 64 << 20
    """Memory for namespaces (a model and a salt each), some 2.5 KiB each. When it is full, the daemon forgets the least
    recently used ones with their blocks. If all are in use (leased, pinned, running), it refuses a client one more, and
    runs requests with one more salt without the cache."""
    lease_ttl_s: Seconds = 60.0
    """Lifetime of a lease or a reservation for which the client asks for none, in seconds."""
    max_lease_ttl_s: Seconds = 3600.0
    """The longest lifetime that a client can ask for, in seconds."""
    drain_timeout_s: Seconds = 60.0
    """How long a drain or a SIGTERM waits for running requests before it ends them, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity of the lines on stderr. debug: a line for each request, too, when it has ended."""
    log_format: Literal["text", "json"] = "text"
    """How the lines on stderr are written. text: for people. json: a JSON object a line, with `request_id` where the
    line is about a request."""
    request_records: Annotated[int, Field(ge=0, le=1 << 20)] = 4096
    """How many of the last requests the daemon remembers for `prefixd why`, of engines' calls too; some 4 KiB each.
    0: none."""
    metrics: HttpAddressText | None = None
    """host:port of the operators' HTTP port, such as 127.0.0.1:9470; none by default. /metrics is for Prometheus, / a
    page with the same figures, /healthz and /readyz are for probes. https://host:port: with TLS. With tokens,
    readers of figures need one with the role metrics or admin (`authorization` in Prometheus' scrape_config), or with
    tls_client_ca a certificate that admin_certificates or metrics_certificates name; with neither, everyone who reaches
    the port reads them."""
    http: HttpAddressText | None = None
    """host:port of the users' HTTP port, such as 127.0.0.1:8000; none by default. It has OpenAI's interface (/v1/...),
    and the operators' pages. https://host:port: with TLS. With tokens, users need one with the role client or admin, or
    a certificate; with neither, everyone who reaches the port is a client of the tenant default."""
    insecure_http: bool = False
    """Open metrics and http without TLS at an address that other hosts reach: others can read the traffic and the
    tokens on the way."""
    audit_log: AbsolutePath | None = None
    """File that gets a line of JSON for each caller that is let in or refused, and for each action of an operator; none
    by default."""

    @check_together(mode="after")
    def _tcp_is_secure_or_says_so(self) -> Self:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"server.{name} = {getattr(self, name)} needs server.{other} too")
        for name in ("metrics", "http"):
            self._check_http(name)
        if self.tcp is None:
            return self
        if self.tls_cert is not None and self.insecure_tcp:
            raise ValueError(
                f"server.insecure_tcp = true and server.tls_cert = {self.tls_cert} contradict each other; keep one"
            )
        if self.tls_cert is None and not self.insecure_tcp:
            raise ValueError(
                f"server.tcp = {self.tcp} has no TLS; set server.tls_cert and server.tls_key, or "
                "server.insecure_tcp = true to let in, without TLS, all callers that reach the port"
            )
        return self

    @check_together(mode="after")
    def _certificates_are_asked_for(self) -> Self:
        for name in ("admin_certificates", "metrics_certificates"):
            if getattr(self, name) and self.tls_client_ca is None:
                raise ValueError(without_authority(f"server.{name}"))
        return self

    def _check_http(self, name: str) -> None:
        """Raises ValueError if an HTTP port has TLS without a certificate, or is public without TLS by mistake."""
        text = getattr(self, name)
        if text is None:
            return
        address = HttpAddress.parse(text)
        if address.tls and self.tls_cert is None:
            raise ValueError(f"server.{name} = {text} has TLS and needs server.tls_cert and server.tls_key")
        if not (address.tls or address.is_loopback or self.insecure_http):
            raise ValueError(
                f"server.{name} = {text} has no TLS, and other hosts reach it; write https://{text.rpartition('/')[2]} "
                "and set server.tls_cert and server.tls_key, or set server.insecure_http = true to open it without TLS"
            )

    @check_together(mode="after")
    def _ttl_within_limit(self) -> Self:
        if self.lease_ttl_s > self.max_lease_ttl_s:
            raise ValueError(
                f"server.lease_ttl_s = {self.lease_ttl_s:g} is above server.max_lease_ttl_s = "
                f"{self.max_lease_ttl_s:g}; lower the first or raise the second"
            )
        return self


def _collector(value: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+:\d{1,5}", value):
        raise ValueError("write http://host:port or https://host:port of a collector's OTLP gRPC receiver, port 4317")
    return value


class TracingSettings(Section):
    """Spans of requests for an OpenTelemetry collector. Needs the extra `otel`."""

    endpoint: Annotated[str, AfterValidator(_collector)] | None = None
    """The collector's OTLP gRPC receiver, such as http://127.0.0.1:4317; https:// encrypts. None by default: no spans.
    OpenTelemetry's variables OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES
    apply."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are recorded, of those without a `traceparent`; of the others the caller decides."""


class EventSettings(Section):
    """KV events tell cache-aware routers which blocks each tier holds; over ZMQ and msgpack, as vLLM publishes them.

    Every client that can connect reads the token ids and the salts of the announced blocks.
    """

    endpoint: Annotated[str, AfterValidator(_zmq)] | None = None
    """Address at which routers subscribe, such as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/prefixd/events. None
    by default: the daemon then publishes no events."""
    connect: bool = False
    """Connect to the endpoint instead of listening there: for routers that listen themselves."""
    replay_endpoint: Annotated[str, AfterValidator(_zmq)] | None = None
    """Address at which subscribers ask for batches that they missed."""
    block_tokens: Count = 16
    """Tokens of a block as routers count them: the engine's block size, 16 by default in vLLM too. The daemon announces
    a block of the cache as several such blocks, or whole if it cannot be divided into them."""
    topic: Annotated[str, AfterValidator(_topic)] = ""
    """The first frame of every message, empty by default as in vLLM; {namespace} in it stands for the namespace's name,
    {tenant} for its tenant. llm-d wants kv@POD@MODEL: POD is its name for the engine to which it sends requests with
    prefixes that this daemon holds, such as 10.0.0.5:8000, and MODEL the model's name in requests."""
    namespaces: Annotated[tuple[AnnouncedNames, ...], BeforeValidator(listed_texts)] = ("default/*",)
    """Namespaces that are announced, besides those that the daemon's own workers fill: TENANT/NAME each; * and ? in
    NAME stand for any characters. A client can choose any name for a namespace, and a router sends a model's traffic to
    the host that announces its prefixes, so name only tenants that routers may trust. (common)/NAME: blocks that have
    become common by cache.share_after. Several tenants need {tenant} in the topic."""
    again_s: Seconds = 5.0
    """For a new subscriber the daemon announces everything again, but at most once in this many seconds, and in at most
    a tenth of the time."""
    buffer_batches: Count = 10_000
    """The most batches kept for replay."""
    buffer_bytes: Bytes = 64 << 20
    """The most bytes of batches kept for replay; the oldest batches are dropped first."""
    queue_batches: Count = 4096
    """The most batches that wait for one subscriber (up to about 100 KiB each); a subscriber that is further behind
    misses some."""

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
