"""The operators' pages: what they have, and who may have them."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import re
import resource
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prefixd.base.errors import ConfigError, InvalidArgumentError, NotFoundError
from prefixd.base.plain_messages import to_plain
from prefixd.base.tenancy.tenants import Tenants
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import Kind
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.identities import Identities, UnknownCallerError
from prefixd.server.access.local_credentials import LocalCredentials
from prefixd.server.access.token_file import TokenFile
from prefixd.server.figures.figure_pages import FigurePages
from prefixd.server.http import operator_routes
from prefixd.server.http.http_callers import HttpCallers
from prefixd.server.http.http_connection import HttpLimits
from prefixd.server.http.http_listener import HttpListener
from prefixd.server.http.http_ports import HttpPorts, users_limits
from prefixd.server.http.operator_routes import OperatorRoutes
from prefixd.server.rpc.call_limits import Refusals
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap import OutOfMemoryError
from tests.waiting import until

PROMETHEUS, ENGINE, OPERATOR = "prometheus-" + "p" * 32, "engine-" + "e" * 32, "operator-" + "o" * 32


class Served:
    """Both ports over figures that a test changes."""

    def __init__(self, settings: dict[str, Any], tokens: TokenFile | None) -> None:
        self.stats = pb.StatsResponse(asked_tokens=7, leases=2, version="1.2.3")
        self.fails = False
        self.now_s = 100.0
        self.reasons: list[str] = []
        known = Settings.load(None, {"server.metrics": "127.0.0.1:0", **settings}, {})
        tenants = Tenants(known.quotas)
        identities = Identities(known.server, known.tenants, tenants, tokens, LocalCredentials(lambda: 0.0, b"boot"))
        self.pages = FigurePages(self._take)
        self.records = RequestLog(lambda: self.now_s, 8, lambda: 1e9)
        operator = OperatorRoutes(self.pages, self.records, self._why, lambda: self.reasons)
        self.ports = HttpPorts(known.server, identities, Refusals(tenants), AuditLog(None), operator, 1000)
        self.url = ""
        self.users_url: str | None = None

    async def _take(self, last_s: float) -> pb.StatsResponse:
        if self.fails:
            raise ZeroDivisionError
        if last_s > 60:
            raise InvalidArgumentError(f"last_s = {last_s:g} is too long")
        if last_s:
            self.stats.period.seconds = last_s
        return self.stats

    async def _why(self, request: pb.WhyRequest) -> pb.WhyResponse:
        if not self.records.find(request.request_id):
            raise NotFoundError(f"no request {request.request_id!r} is remembered")
        return pb.WhyResponse(requests=[pb.RequestInfo(id=request.request_id, sentence="It waited.")])

    async def open(self) -> None:
        self.url = str(await self.ports.open_metrics())
        self.users_url = await self.ports.open_users(lambda callers: [Route("/who", who(callers))])

    async def get(self, path: str, token: str = "", verify: ssl.SSLContext | bool = False, **headers: str) -> Any:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        async with httpx.AsyncClient(verify=verify, trust_env=False) as client:
            return await client.get(path if "://" in path else self.url + path, headers=headers)


def who(callers: HttpCallers) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            caller = callers.identify(request)
        except UnknownCallerError as error:
            return PlainTextResponse(str(error), 401)
        return PlainTextResponse(f"{caller.tenant.name} {caller.role} {caller.name} {caller.door} {caller.host}")

    return answer


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    made: list[Served] = []
    files: list[TokenFile] = []

    async def start(tokens: str = "", **settings: Any) -> Served:
        given = {f"server.{name}": value for name, value in settings.items()}
        file = None
        if tokens:
            path = tmp_path / "tokens"
            path.touch(mode=0o600)
            path.write_text(tokens)
            files.append(file := TokenFile(path))
            await file.load()
        served = Served(given, file)
        made.append(served)
        await served.open()
        return served

    yield start
    for served in made:
        await served.ports.close(0.0)
        served.pages.close()
    for file in files:
        file.close()


async def test_the_metrics_have_the_figures_of_their_moment(serve: Serve) -> None:
    served = await serve()
    for asked in (7, 8):
        served.stats.asked_tokens = asked
        page = (await served.get("/metrics")).text
        assert f"prefixd_asked_tokens_total {asked}.0\n" in page and "prefixd_leases 2.0\n" in page
    answer = await served.get("/metrics?x=1", Accept="application/openmetrics-text;version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert (await served.get("/api/stats")).json() == to_plain(served.stats)
    assert (await served.get("/api/stats?last_s=30.5")).json()["period"]["seconds"] == 30.5
    for wrong, words in (("61", "last_s = 61 is too long"), ("often", "last_s=often is no number")):
        answer = await served.get(f"/api/stats?last_s={wrong}")
        assert (answer.status_code, words in answer.text) == (400, True)
    missing = await served.get("/favicon.ico")
    assert missing.status_code == 404 and "/metrics" in missing.text


async def test_figures_that_cannot_be_had_are_an_error_of_that_scrape(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    served.fails = True
    assert (await served.get("/metrics")).status_code == 500
    assert len(caplog.records) == 1 and "GET /metrics failed" in caplog.text and "ZeroDivisionError" in caplog.text
    served.fails = False
    assert (await served.get("/metrics")).status_code == 200


async def test_probes_say_whether_the_daemon_lives_and_takes_work(serve: Serve) -> None:
    served = await serve(f"prometheus metrics {PROMETHEUS}\n")
    assert (await served.get("/healthz")).text == "alive\n"
    assert (await served.get("/readyz")).text == "ready\n"
    served.reasons = ["the model llama loads", "the daemon drains"]
    answer = await served.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "the model llama loads; the daemon drains\n")


async def test_roles_open_the_figures_and_the_users_port(serve: Serve) -> None:
    tokens = f"prometheus metrics {PROMETHEUS}\nengine client {ENGINE} acme\noperator admin {OPERATOR}\n"
    served = await serve(tokens, http="127.0.0.1:0")
    for url in (served.url, served.users_url):
        answers = [await served.get(f"{url}/metrics", token) for token in (PROMETHEUS, OPERATOR, ENGINE, "x" * 40, "")]
        assert [answer.status_code for answer in answers] == [200, 200, 403, 401, 401]
        assert "engine has the role client" in answers[2].text and "metrics or admin" in answers[2].text
        assert answers[3].headers["www-authenticate"].startswith("Bearer")
    found = [await served.get(f"{served.users_url}/who", token) for token in (ENGINE, OPERATOR, "")]
    assert [each.text for each in found] == [
        "acme client engine http ",
        "default admin operator http ",
        "the token is missing",
    ]
    assert (await served.get("/who", ENGINE)).status_code == 404, "the operators' port has only their routes"


async def test_without_tokens_everyone_is_a_client_whatever_key_is_sent(serve: Serve) -> None:
    served = await serve(http="127.0.0.1:0")
    assert (await served.get(f"{served.users_url}/who", "EMPTY")).text == "default client anybody http 127.0.0.1"
    assert (await served.get("/metrics", "EMPTY")).status_code == 200


async def test_a_public_port_that_lets_everyone_in_is_said(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    await serve(metrics="0.0.0.0:0", insecure_http=True)
    assert "server.metrics = 0.0.0.0:0: everyone who reaches the port may use it; set server.tokens" in caplog.text
    caplog.clear()
    await serve(f"operator admin {OPERATOR}\n", metrics="0.0.0.0:0", insecure_http=True)
    await serve()
    assert not caplog.records


async def test_the_page_has_no_figures_and_may_load_nothing_from_elsewhere(serve: Serve) -> None:
    served = await serve(f"prometheus metrics {PROMETHEUS}\n")
    answer = await served.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(|style="|onclick""", answer.text)
    assert (await served.get("/api/requests")).status_code == 401


async def test_the_last_requests(serve: Serve) -> None:
    served = await serve()
    for name in ("first", "second"):
        served.now_s += 1
        record = served.records.begin(Kind.GENERATE, "Generate", id=name, tenant="acme", model="llama")
        record.prompt_tokens, record.hit_tokens = 40, [32, 0, 0, 0]
    served.now_s += 0.5
    record.first_token_s = served.now_s
    record.end("stop", served.now_s)
    answer = (await served.get("/api/requests?last=1")).json()["requests"]
    assert [each["id"] for each in answer] == ["second"]
    assert answer[0]["first_token_s"] == 0.5 and answer[0]["hit_tokens"] == [32, 0, 0, 0]
    assert [each["outcome"] for each in (await served.get("/api/requests")).json()["requests"]] == ["stop", ""]
    refused = await served.get("/api/requests?last=x")
    assert refused.status_code == 400 and "last=x" in refused.text


async def test_a_thread_writes_the_answer_to_why(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 requests it takes 30 ms."""
    threads = list[threading.Thread]()

    def noted(message: Message) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return to_plain(message)

    monkeypatch.setattr(operator_routes, "to_plain", noted)
    served = await serve(f"operator admin {OPERATOR}\n")
    served.records.begin(Kind.GENERATE, "Generate", id="mine")
    assert (await served.get("/api/why/mine", OPERATOR)).status_code == 200
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_why_is_for_operators_alone(serve: Serve) -> None:
    served = await serve(f"prometheus metrics {PROMETHEUS}\noperator admin {OPERATOR}\n")
    served.records.begin(Kind.GENERATE, "Generate", id="team/a b")
    answers = [await served.get("/api/why/team/a%20b", token) for token in (OPERATOR, PROMETHEUS, "")]
    assert [answer.status_code for answer in answers] == [200, 403, 401]
    assert answers[0].json()["requests"][0]["sentence"] == "It waited."
    missing = await served.get("/api/why/x", OPERATOR)
    assert missing.status_code == 404 and "'x' is remembered" in missing.text
    open_to_all = await serve()
    answer = await open_to_all.get("/api/why/x")
    assert answer.status_code == 403 and "role admin, which nobody has" in answer.text, "it shows parts of prompts"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and for each name NAME.pem with its NAME.key; `stranger` is of another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, issuer: x509.Name, signer: Any, *, authority: bool) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer if signer else subject)
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        made = made.add_extension(x509.BasicConstraints(authority, None), True)
        loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        signed = made.add_extension(loopback, False).sign(signer or key, hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        private = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
        return subject, key

    for authority, names in (("ca", ("server", "prometheus", "engine")), ("other-ca", ("stranger",))):
        issuer, signer = certificate(authority, x509.Name([]), None, authority=True)
        for name in names:
            certificate(name, issuer, signer, authority=False)
    return folder


@pytest.mark.slow
async def test_who_reads_no_answer_is_cut_off_under_tls(certificates: Path) -> None:
    async def large(request: Request) -> Response:
        return PlainTextResponse("x" * (16 << 20))  # more than the kernel takes for somebody who does not read

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    listener = HttpListener(Starlette(routes=[Route("/", large)]), HttpLimits(send_s=0.1), context)
    url = f"https://127.0.0.1:{await listener.start('127.0.0.1', 0)}/"
    trusting = ssl.create_default_context(cafile=certificates / "ca.pem")
    async with httpx.AsyncClient(verify=trusting, trust_env=False) as client:
        assert len((await client.get(url)).text) == 16 << 20
    await until(lambda: not listener.connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].strip("/")), ssl=trusting)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: listener.connections)
    await until(lambda: not listener.connections, 30)
    writer.close()
    await listener.close()
    del reader


@pytest.mark.slow
async def test_certificates_open_the_figures(serve: Serve, certificates: Path) -> None:
    served = await serve(
        metrics="https://127.0.0.1:0",
        http="https://127.0.0.1:0",
        tls_cert=certificates / "server.pem",
        tls_key=certificates / "server.key",
        tls_client_ca=certificates / "ca.pem",
        metrics_certificates=["prometheus"],
    )

    def shown(name: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        if name:
            context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
        return context

    answers = [await served.get("/metrics", verify=shown(name)) for name in ("prometheus", "engine", "")]
    assert [answer.status_code for answer in answers] == [200, 403, 401]
    assert (await served.get("/readyz", verify=shown())).status_code == 200, "probes have no certificate"
    who = [await served.get(f"{served.users_url}/who", verify=shown(name)) for name in ("engine", "")]
    assert [answer.text for answer in who] == ["default client engine http ", "no certificate was sent"]
    with pytest.raises(httpx.HTTPError):
        await served.get("/readyz", verify=shown("stranger"))
    with pytest.raises(httpx.HTTPError):
        await served.get(served.url.replace("https", "http") + "/readyz")


def test_the_users_port_has_a_connection_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100_000, 100_000))
    assert users_limits(4000).connections == 4256
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert users_limits(4000).connections == 512


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"server.metrics": "9470"}, "write host:port"),
        ({"server.metrics": "ftp://h:1"}, "write host:port"),
        ({"server.metrics": "h:99999"}, "write host:port"),
        ({"server.metrics": "0.0.0.0:9470"}, r"has no TLS.*https://0\.0\.0\.0:9470.*server\.insecure_http"),
        ({"server.http": "[::]:8000"}, r"https://\[::\]:8000"),
        ({"server.http": "https://127.0.0.1:8000"}, r"needs server\.tls_cert"),
        ({"server.metrics_certificates": ["a"]}, r"server\.metrics_certificates names certificates"),
        ({"server.metrics_port": 9470}, r'write server\.metrics = "127\.0\.0\.1:PORT"'),
    ],
)
def test_addresses_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.load(None, settings, {})


def test_addresses_that_need_no_tls() -> None:
    for address in ("127.0.0.1:0", "localhost:1", "[::1]:9470", "http://127.0.0.1:9470"):
        assert Settings.load(None, {"server.http": address}, {}).server.http == address


def test_no_thread_for_the_pages_is_said(
    no_more_threads: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    async def take(last_s: float) -> pb.StatsResponse:
        return pb.StatsResponse()

    with no_more_threads(), pytest.raises(OutOfMemoryError, match="ulimit -u"):
        FigurePages(take)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
    ids=str,
)
async def test_pages_of_other_sites_may_not_use_an_open_port(serve: Serve, headers: dict[str, str]) -> None:
    """A browser on this host would send these for them: forged POSTs and DNS rebinding."""
    served = await serve(http="127.0.0.1:0")
    for path in ("/api/requests", "/who"):
        answer = await served.get(f"{served.users_url}{path}", **headers)
        assert answer.status_code == 403 and "server.tokens" in answer.text


async def test_what_is_of_this_host_may(serve: Serve) -> None:
    served = await serve()
    for name in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.3.2.1:9", "[::1]:80", "prefixd.localhost"):
        assert (await served.get("/api/requests", Host=name, Origin=f"http://{name}")).status_code == 200
    known = await serve(f"operator admin {OPERATOR}\n")
    headers = {"Host": "cache.example", "Origin": "https://cache.example"}  # a proxy on this host, in front of a port
    assert (await known.get("/api/requests", token=OPERATOR, **headers)).status_code == 200
    assert (await known.get("/api/requests", **headers)).status_code == 401
