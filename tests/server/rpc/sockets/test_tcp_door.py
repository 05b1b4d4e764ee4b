"""Who comes in over TCP: by TLS, by a certificate, by a token, or by an explicit flag."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixd.base.errors import ConfigError
from prefixd.cache import Troubles
from prefixd.client import (
    Client,
    InvalidArgumentError,
    NamespaceSpec,
    PartSpec,
    PermissionDeniedError,
    ServerUnavailable,
)
from prefixd.server.access import token_file
from prefixd.server.access.token_file import TokenFile, read_tokens
from prefixd.server.rpc.sockets.tls import tls_credentials
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.daemons import Remote

SIDECAR: dict[str, str | int] = {"cpu.bytes": "1MiB", "disk.bytes": "0", "server.tcp": "127.0.0.1:0"}
ENGINE, OPERATOR = "engine-" + "e" * 32, "operator-" + "o" * 32
SPEC = NamespaceSpec("far", 4, (PartSpec("full", 0, 128),))

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates; not found")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, `server` and `client` signed by it, and `other-ca.pem` with `stranger`; each with its `.key`."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for authority, names in (("ca", ("server", "client")), ("other-ca", ("stranger",))):
        files = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        openssl("req", "-x509", *new_key, "-days", "2", "-subj", f"/CN=a test's {authority}", *files)
        for name in names:
            openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
            (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
            signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2")
            openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", "names", "-out", f"{name}.pem")
    return folder


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", f"# who may come\nengine client {ENGINE}\n\noperator admin {OPERATOR}\n")


def write_tokens(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def works(remote: Remote, **credentials: Any) -> None:
    """Stores and loads over TCP."""
    with Client(remote.daemon.tcp, timeout_s=60, **credentials) as client:
        cache = client.register(SPEC)
        cache.store(range(40), bytes(range(128)) * 10)
        into = bytearray(1280)
        assert cache.load(range(40), into) == 10 and bytes(into) == bytes(range(128)) * 10
        assert client.arena is None


@needs_openssl
def test_tls(launch: Callable[..., Remote], certificates: Path) -> None:
    files = {"server.tls_cert": str(certificates / "server.pem"), "server.tls_key": str(certificates / "server.key")}
    remote = launch(SIDECAR | files)
    works(remote, tls_ca=certificates / "ca.pem")
    for credentials in ({}, {"tls_ca": certificates / "other-ca.pem"}):
        with Client(remote.daemon.tcp, timeout_s=10, **credentials) as client, pytest.raises(ServerUnavailable):
            client.stats()


@needs_openssl
@pytest.mark.slow
def test_mutual_tls(launch: Callable[..., Remote], certificates: Path) -> None:
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    remote = launch(SIDECAR | {f"server.{name}": str(certificates / file) for name, file in files.items()})

    def shown(name: str) -> dict[str, Path]:
        return {"tls_cert": certificates / f"{name}.pem", "tls_key": certificates / f"{name}.key"}

    authority = {"tls_ca": certificates / "ca.pem"}
    works(remote, **authority, **shown("client"))
    for credentials in (authority, authority | shown("stranger")):
        with Client(remote.daemon.tcp, timeout_s=10, **credentials) as client, pytest.raises(ServerUnavailable):
            client.stats()


@pytest.fixture
def guarded(launch: Callable[..., Remote], tokens: Path) -> Remote:
    """Tokens, and no TLS."""
    return launch(SIDECAR | {"server.insecure_tcp": "true", "server.tokens": str(tokens)})


@pytest.mark.slow
def test_each_role_opens_what_it_should(guarded: Remote) -> None:
    works(guarded, token=ENGINE)
    works(guarded, token=OPERATOR)
    with Client(guarded.daemon.tcp, token=OPERATOR) as client:
        assert client.stats().version
    with (
        Client(guarded.daemon.tcp, token=ENGINE) as client,
        pytest.raises(PermissionDeniedError, match=r"role admin.*engine has the role client; use a token"),
    ):
        client.stats()
    for token in ("", "x" * 40, ENGINE[:-1], ENGINE + "e", "operator"):
        with (
            Client(guarded.daemon.tcp, token=token) as client,
            pytest.raises(PermissionDeniedError, match=r"server\.tokens.*PREFIXD_TOKEN"),
        ):
            client.register(SPEC)
    assert guarded.stats().version  # the unix socket asks for none
    log = guarded.daemon.log.read_text()
    assert ENGINE not in log and OPERATOR not in log and "Traceback" not in log


@pytest.mark.slow
def test_every_method_asks_for_a_token_but_health(guarded: Remote, refused: Callable[..., Any]) -> None:
    with grpc.insecure_channel(guarded.daemon.tcp) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        cache, inference = cache_pb2_grpc.PrefixCacheStub(channel), inference_pb2_grpc.InferenceStub(channel)
        calls: list[Callable[..., Any]] = [
            lambda **how: cache.Match(cache_pb2.MatchRequest(), **how),
            lambda **how: next(cache.OpenSession(cache_pb2.OpenSessionRequest(), **how)),
            lambda **how: next(cache.Get(cache_pb2.GetRequest(), **how)),
            lambda **how: cache.Put(iter([]), **how),
            lambda **how: next(inference.Generate(inference_pb2.GenerateRequest(), **how)),
            lambda **how: admin_pb2_grpc.AdminStub(channel).Drain(admin_pb2.DrainRequest(), **how),
            lambda **how: channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/None")(b"", **how),
            lambda **how: channel.unary_unary("/nothing/here")(b"\xff" * 9, **how),
        ]
        for call in calls:
            with refused("UNAUTHENTICATED", "is missing"):
                call(timeout=60)
            for metadata in (
                [("authorization", ENGINE)],
                [("authorization", f"Basic {ENGINE}")],
                [("authorization", "Bearer")],
                [("authorization", f"Bearer {ENGINE}"), ("authorization", "Bearer another")],
            ):
                with refused("UNAUTHENTICATED", "is not known here"):
                    call(timeout=60, metadata=metadata)
        with refused("UNIMPLEMENTED"):
            calls[-1](timeout=60, metadata=[("authorization", f"bearer {ENGINE}")])
    assert not guarded.stats().draining


@needs_openssl
@pytest.mark.slow
def test_the_command_line_brings_its_credentials(
    launch: Callable[..., Remote], certificates: Path, tokens: Path, tmp_path: Path
) -> None:
    files = {"server.tls_cert": str(certificates / "server.pem"), "server.tls_key": str(certificates / "server.key")}
    remote = launch(SIDECAR | files | {"server.tokens": str(tokens)})
    authority = certificates / "ca.pem"
    assert remote.daemon.tcp is not None

    def stats(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXD_")}
        command = [sys.executable, "-m", "prefixd", "stats", "--json", *map(str, arguments)]
        return subprocess.run(command, env=ours | environment, capture_output=True, text=True, timeout=100, check=False)

    (tmp_path / "token").write_text(f"{OPERATOR}\n")
    by_flags = stats("--address", remote.daemon.tcp, "--tls-ca", authority, "--token-file", tmp_path / "token")
    assert by_flags.returncode == 0 and '"version"' in by_flags.stdout, by_flags.stderr
    known = {"PREFIXD_ADDRESS": remote.daemon.tcp, "PREFIXD_TLS_CA": str(authority)}
    assert stats(**known, PREFIXD_TOKEN=OPERATOR).returncode == 0
    refused = stats(**known, PREFIXD_TOKEN=ENGINE)
    assert refused.returncode == 1 and "needs the role admin" in refused.stderr
    lost = stats("--tls-ca", "/nowhere", **known)
    assert lost.returncode == 2 and lost.stderr == "prefixd: tls_ca = /nowhere: No such file or directory\n"
    plain = stats("--address", remote.daemon.tcp)
    assert plain.returncode == 1 and "Does it need TLS (--tls-ca)?" in plain.stderr


@pytest.mark.slow
def test_connections_have_a_limit(guarded: Remote) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"needs 2048 descriptors, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    host, _, port = (guarded.daemon.tcp or "").rpartition(":")
    visitors: list[socket.socket] = []
    try:
        for _ in range(600):
            visitors.append(socket.create_connection((host, int(port)), timeout=60))
        # gRPC accepts those beyond the limit, to close them at once.
        guarded.until(lambda _: len(os.listdir(f"/proc/{guarded.daemon.pid}/fd")) < 600)
        assert any(visitor.recv(1) == b"" for visitor in visitors[-50:])
    finally:
        for visitor in visitors:
            visitor.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- what is refused before it starts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f"engine client {ENGINE}\n", 0o644, r"mode 0644.*chmod 600"),
        (f"engine client {ENGINE}\n", 0o640, r"mode 0640.*chmod 600"),
        ("", 0o600, "has no token"),
        ("# engine client\n", 0o600, "has no token"),
        (f"engine {ENGINE}\n", 0o600, r"line 1 has 2 words; write `name role token \[tenant\]`"),
        (f"\nengine root {ENGINE}\n", 0o600, r"line 2: the role of engine is none of metrics, client, admin"),
        ("engine client eeeeee-short\n", 0o600, "16 or more ASCII characters.*openssl rand"),
        ("engine client eeeeeeeeeeeeeeeéeeeeeeee\n", 0o600, "ASCII"),
        (f"engine client {ENGINE}\nengine admin {OPERATOR}\n", 0o600, "line 2: the name engine repeats"),
        (f"engine client {ENGINE}\nother admin {ENGINE}\n", 0o600, "line 2: the token of other repeats"),
    ],
)
async def test_a_file_of_tokens_that_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    path = write_tokens(tmp_path / "tokens", text, mode)
    with pytest.raises(ConfigError, match=words) as caught:
        await read_tokens(path)
    assert str(path) in str(caught.value) and "eeee" not in str(caught.value)


async def test_tokens_are_not_kept(tokens: Path) -> None:
    read = await read_tokens(tokens)
    assert [(token.name, token.role) for token in read] == [("engine", "client"), ("operator", "admin")]
    assert ENGINE not in repr(read)


# -- the file changes -------------------------------------------------------------------------------------------------


def names(file: TokenFile) -> list[str]:
    return [token.name for token in file.tokens]


async def test_a_file_that_changes_is_read_again(tokens: Path) -> None:
    file, troubles = TokenFile(tokens), Troubles(time.monotonic)
    assert names(file) == []
    await file.load()
    assert names(file) == ["engine", "operator"]
    write_tokens(tokens, f"operator admin {OPERATOR}\n")
    await file.reload_if_changed(troubles)
    assert names(file) == ["operator"]
    fresh = write_tokens(tokens.with_name("fresh"), f"# taken out: operator\nengine client {ENGINE}\n")
    os.utime(fresh, ns=(0, tokens.stat().st_mtime_ns))
    fresh.rename(tokens)
    await file.reload_if_changed(troubles)
    assert names(file) == ["engine"] and not list(troubles)
    file.close()


async def test_a_file_that_cannot_be_used_leaves_the_tokens_and_is_said_until_it_can(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, troubles = TokenFile(tokens), Troubles(time.monotonic)
    await file.load()

    def spoil(how: str) -> None:
        if how == "gone":
            tokens.unlink()
        elif how == "readable by others":
            tokens.chmod(0o644)
        elif how == "wrong":
            write_tokens(tokens, "engine client\n")

    for how, words, remedy in (
        ("readable by others", "mode 0644", "run `chown"),
        ("wrong", "line 1 has 2 words", "write `name role token [tenant]`"),
        ("gone", "No such file or directory", "put the file back"),
    ):
        spoil(how)
        for _ in range(2):
            await file.reload_if_changed(troubles)
        (trouble,) = troubles
        assert trouble.part == "tokens" and words in trouble.what and remedy in trouble.remedy
        assert "read before stay valid" in trouble.what
        assert names(file) == ["engine", "operator"]
        write_tokens(tokens, f"engine client {ENGINE}\noperator admin {OPERATOR}\n")
        await file.reload_if_changed(troubles)
        assert not list(troubles)
    assert ENGINE not in caplog.text
    file.close()


async def test_a_file_that_changes_while_it_is_read_is_read_once_more(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, troubles = TokenFile(tokens), Troubles(time.monotonic)
    really = read_tokens

    async def read(path: Path, threads: Any = None) -> Any:
        found = await really(path, threads)
        write_tokens(path, f"operator admin {OPERATOR}\n")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(token_file, "read_tokens", read)
        await file.load()
    assert names(file) == ["engine", "operator"]
    await file.reload_if_changed(troubles)
    assert names(file) == ["operator"]
    file.close()


@pytest.mark.slow
def test_a_token_that_is_taken_out_opens_nothing_any_more(guarded: Remote, tokens: Path) -> None:
    works(guarded, token=ENGINE)
    write_tokens(tokens, f"engine client {ENGINE[:-1]}x\noperator admin {OPERATOR}\n")
    deadline = time.monotonic() + 60
    with (
        Client(guarded.daemon.tcp, token=ENGINE) as client,
        pytest.raises(PermissionDeniedError, match=r"server\.tokens"),
    ):
        while time.monotonic() < deadline:
            client.register(SPEC)
    works(guarded, token=f"{ENGINE[:-1]}x")
    tokens.unlink()
    guarded.until(lambda stats: any(trouble.part == "tokens" for trouble in stats.troubles))
    works(guarded, token=f"{ENGINE[:-1]}x")
    write_tokens(tokens, f"engine client {ENGINE}\n")
    guarded.until(lambda stats: not stats.troubles)
    works(guarded, token=ENGINE)


@needs_openssl
def test_certificates_that_are_refused(certificates: Path, tmp_path: Path) -> None:
    def credentials(**names: str) -> None:
        files = {"tls_cert": "server.pem", "tls_key": "server.key", **names}
        chosen = {f"server.{name}": str(certificates / file) for name, file in files.items()}
        assert tls_credentials(Settings.load(None, chosen, {}).server) is not None

    (certificates / "text").write_text("no certificate")
    credentials()
    for names, words in (
        ({"tls_cert": "missing"}, "missing: No such file"),
        ({"tls_key": "client.key"}, r"KEY_VALUES_MISMATCH|key values mismatch"),
        ({"tls_cert": "text"}, "server.tls_cert = .*not a certificate in PEM"),
        ({"tls_key": "text"}, "and server.tls_key = .*text are not a certificate in PEM"),
        ({"tls_client_ca": "text"}, "server.tls_client_ca = .*text has no certificate in PEM"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            credentials(**names)
        assert "\n" not in str(caught.value)


@needs_openssl
def test_what_a_client_is_told_about_its_files(certificates: Path) -> None:
    authority, cert, key = certificates / "ca.pem", certificates / "client.pem", certificates / "server.key"
    for credentials, words in (
        ({"tls_cert": cert}, "belong together"),
        ({"tls_cert": cert, "tls_key": key}, "give tls_ca too"),
        ({"token": "line\n"}, "visible ASCII"),
        ({"tls_ca": certificates / "missing"}, "missing: No such file"),
        ({"tls_ca": authority, "tls_cert": cert, "tls_key": key}, r"client\.pem, tls_key.*not certificates in PEM"),
    ):
        with pytest.raises(InvalidArgumentError, match=words), Client("127.0.0.1:9", **credentials) as client:
            client.stats()


@pytest.mark.slow
def test_a_port_that_cannot_be_opened_safely_is_refused(
    serve_failing: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    settings = {"data_dir": str(tmp_path / "data"), "server.socket": f"{tmp_path}/s", "server.tcp": "127.0.0.1:0"}
    done = serve_failing(settings)
    assert done.returncode == 2 and "server.tcp = 127.0.0.1:0 has no TLS; set server.tls_cert" in done.stderr
    lost = {**settings, "server.insecure_tcp": "true", "server.tokens": "/nowhere"}
    assert serve_failing(lost).stderr.splitlines()[-1] == "prefixd: server.tokens = /nowhere: No such file or directory"
    assert not (tmp_path / "data").exists()
