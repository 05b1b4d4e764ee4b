"""Two daemons on two data directories share a store: whatever happens to it no request fails and no byte is wrong.

A reaches the store directly, B over a link that can be slow. Every prompt is new, and its tokens are those of the host
that computed it with nothing cached.
"""

from __future__ import annotations

import datetime
import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from benchmarks.stand_ins.slow_link import SlowLink
from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from tests.remote.certificates import new_certificates
from tests.remote.hosts import BLOCK, Answer, Host, host, prompt
from tests.remote.mooncake_server import mooncake_server
from tests.remote.processes import free_port
from tests.remote.s3_server import s3_server
from tests.remote.valkey_server import ValkeyServer, valkey_server

RESUMED_S = 30.0  # a daemon asks a store that is out of service again every four seconds
TOLD_S = 30.0
BLOCKS = 20
_SEEDS = itertools.count(1)


class Store:
    """A Valkey that can be killed, and started again, empty, on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.running = ExitStack()
        self.server = self.start()

    def start(self) -> ValkeyServer:
        self.server = self.running.enter_context(valkey_server(self._folder, port=self.port))
        return self.server

    def kill(self) -> None:
        self.server.process.end()


@dataclass
class Pair:
    """Hosts A and B, the store, and B's way to it."""

    a: Host
    b: Host
    store: Store
    link: SlowLink

    def shared(self, blocks: int = BLOCKS) -> tuple[list[int], Answer]:
        """A new prompt, and what A answers to it, once its blocks are in the store."""
        made = prompt(next(_SEEDS), blocks)
        before = self.a.client.stats().remote.shared_blocks
        answer = self.a.ask(made)
        assert answer.found == 0
        self.a.wait_until_shared(before + blocks)
        return made, answer

    def same(self) -> None:
        """Both hosts answer a new prompt alike."""
        made = prompt(next(_SEEDS), BLOCKS)
        assert self.a.ask(made).tokens == self.b.ask(made).tokens

    def b_loads(self, blocks: int) -> tuple[Answer, threading.Thread, list[Answer]]:
        """B is in the middle of loading a prompt: what A has answered to it, who asks B, and where its answer comes.

        The link is slow from here on. Where B has heard of the prompt too late, it computes it: then of another one.
        """
        for _ in range(10):
            made, want = self.shared(blocks)
            self.link.bytes_per_s = 2e6
            before, answers = self.link.forwarded_bytes[1], list[Answer]()
            asking = threading.Thread(target=lambda made=made, answers=answers: answers.append(self.b.ask(made)))
            asking.start()
            while asking.is_alive():
                if self.link.forwarded_bytes[1] > before + 100_000:  # more than any answer but a block
                    return want, asking, answers
                time.sleep(0.005)
        raise AssertionError(f"B loads nothing from the store: {self.b.trouble()!r}")

    def resumes(self) -> None:
        """Within some seconds the store is in service again, and B finds what A has computed since."""
        for each in (self.a, self.b):
            each.wait(lambda each=each: not each.trouble(), RESUMED_S, "the store is in service")
        made, want = self.shared()
        assert self.b.find(made).tokens == want.tokens


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        store = Store(folder / "valkey")
        stack.enter_context(store.running)
        link = stack.enter_context(SlowLink("127.0.0.1", store.port))
        a = stack.enter_context(host(folder / "a", f"valkey://127.0.0.1:{store.port}"))
        # What B finds in the store is A's, since B writes nothing there.
        b = stack.enter_context(host(folder / "b", f"valkey://127.0.0.1:{link.port}", remote__share="none"))
        yield Pair(a, b, store, link)


@pytest.fixture
def pair(both: Pair) -> Iterator[Pair]:
    """Well at the beginning, and checked at the end."""
    both.link.latency_s, both.link.bytes_per_s = 0.0, math.inf
    for each in (both.a, both.b):
        each.wait(lambda each=each: not each.trouble(), RESUMED_S, "no trouble is left from the test before")
    yield both
    both.link.latency_s, both.link.bytes_per_s = 0.0, math.inf
    both.a.check()
    both.b.check()


def test_the_first_request_of_a_cold_host_hits(pair: Pair) -> None:
    made, want = pair.shared()
    got = pair.b.ask(made)
    assert (got.tokens, got.found) == (want.tokens, BLOCKS * BLOCK)
    again = pair.b.ask(made)
    assert (again.tokens, again.remote, again.found) == (want.tokens, 0, BLOCKS * BLOCK)


def test_a_store_killed_in_the_middle_of_a_load(pair: Pair) -> None:
    want, asking, answers = pair.b_loads(40)
    pair.store.kill()
    asking.join(30)
    assert [answer.tokens for answer in answers] == [want.tokens]
    pair.b.wait(pair.b.trouble, TOLD_S, "the trouble is told")
    pair.same()
    pair.store.start()
    pair.link.bytes_per_s = math.inf
    pair.resumes()


def test_a_store_killed_in_the_middle_of_a_save(pair: Pair) -> None:
    made, first = pair.shared()
    before = pair.a.client.stats().remote.shared_blocks
    others = [prompt(next(_SEEDS), BLOCKS) for _ in range(3)]
    asking = threading.Thread(target=lambda: [pair.a.ask(each) for each in others])
    asking.start()
    pair.a.wait(lambda: pair.a.client.stats().remote.shared_blocks > before, 20, "a save has begun")
    pair.store.kill()
    asking.join(60)
    assert not asking.is_alive()
    assert pair.b.ask(made).tokens == first.tokens
    pair.same()
    pair.a.wait(pair.a.trouble, TOLD_S, "the trouble is told")
    pair.store.start()
    pair.resumes()
    # What the store has lost is written again by who still has it.
    pair.b.find(others[0])


def test_a_frozen_store(pair: Pair) -> None:
    made, want = pair.shared()
    pair.store.server.process.freeze()
    got = pair.b.ask(made)
    assert (got.tokens, got.remote) == (want.tokens, 0)
    pair.b.wait(pair.b.trouble, TOLD_S, "the trouble is told")
    pair.same()
    pair.store.server.process.thaw()
    pair.resumes()


def test_a_store_frozen_in_the_middle_of_a_load(pair: Pair) -> None:
    want, asking, answers = pair.b_loads(40)
    pair.store.server.process.freeze()
    asking.join(30)
    assert [answer.tokens for answer in answers] == [want.tokens]
    pair.link.bytes_per_s = math.inf
    pair.store.server.process.thaw()
    pair.resumes()


def test_a_full_store(pair: Pair) -> None:
    pair.store.server.ask(b"FLUSHALL")
    pair.store.server.ask(b"CONFIG", b"SET", b"maxmemory", b"12mb")
    made = [prompt(next(_SEEDS), 30) for _ in range(3)]
    wants = [pair.a.ask(each) for each in made]
    pair.a.wait(pair.a.trouble, TOLD_S, "the trouble is told")
    assert [pair.b.ask(each).tokens for each in made] == [want.tokens for want in wants]
    pair.store.server.ask(b"CONFIG", b"SET", b"maxmemory", b"0")
    for each in (pair.a, pair.b):
        each.wait(lambda each=each: not each.trouble(), RESUMED_S, "the trouble ends")
    pair.resumes()


def test_fifty_milliseconds_of_latency(pair: Pair) -> None:
    made = [pair.shared() for _ in range(2)]
    pair.link.latency_s = 0.025
    assert [pair.b.ask(each).tokens for each, _ in made] == [want.tokens for _, want in made]
    # The answer takes longer than a prompt waits for it; the next one that begins like it knows.
    known = made[0][0]
    assert pair.b.ask([*known[:-1], known[-1] + 1]).found == BLOCKS * BLOCK
    pair.same()


def test_altered_objects(pair: Pair, tmp_path: Path) -> None:
    pair.store.server.ask(b"FLUSHALL")
    made, want = pair.shared()
    names = pair.store.server.ask(b"KEYS", b"*").split(b"\r\n")[2::2]
    assert len(names) >= BLOCKS
    for name in names:
        pair.store.server.ask(b"SETRANGE", name, b"300", b"altered")
    url = f"valkey://127.0.0.1:{pair.store.port}"
    with host(tmp_path / "c", url, remote__timeout_s=20) as c:
        assert c.ask(made).tokens == want.tokens
        altered = c.client.stats().remote.bad_objects["altered"]
        assert altered > 0
        # Who has computed them writes them anew.
        c.wait_until_shared(altered)
    with host(tmp_path / "d", url, remote__timeout_s=20) as d:
        repaired = d.ask(made)
        assert repaired.tokens == want.tokens
        assert repaired.found > 0


def test_an_encrypted_store_serves_those_with_the_key(pair: Pair, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a key of thirty-two bytes or more")
    key.chmod(0o600)
    url, (made, want) = f"valkey://127.0.0.1:{pair.store.port}", pair.shared()
    encrypted = {"remote__encryption_key_file": key, "remote__timeout_s": 20}
    with host(tmp_path / "c", url, **encrypted) as c:
        got = c.ask(made)
        assert (got.tokens, got.remote) == (want.tokens, 0), "hosts without the key have names of their own"
        c.wait_until_shared(BLOCKS)
        assert not c.client.stats().remote.bad_objects
        with host(tmp_path / "d", url, **encrypted) as d:
            got = d.ask(made)
            assert (got.tokens, got.found) == (want.tokens, BLOCKS * BLOCK)


@pytest.mark.parametrize("kind", ["s3", "mooncake"])
def test_other_stores_serve_a_cold_host_too(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        if kind == "s3":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            server = stack.enter_context(s3_server(tmp_path))
            url = f"s3://{server.new_bucket()}/blocks"
            endpoint = f"http://127.0.0.1:{server.port}"
            settings: dict[str, object] = {"remote__endpoint": endpoint, "remote__insecure_http": True}
        else:
            master = stack.enter_context(mooncake_server(tmp_path / "mooncake"))
            url, settings = f"mooncake://127.0.0.1:{master.port}", {}
        settings["remote__timeout_s"] = 20  # the first call connects
        a = stack.enter_context(host(tmp_path / "a", url, **settings))
        made = prompt(next(_SEEDS), BLOCKS)
        want = a.ask(made)
        a.wait_until_shared(BLOCKS)
        b = stack.enter_context(host(tmp_path / "b", url, **settings))
        got = b.ask(made)
        assert (got.tokens, got.found) == (want.tokens, BLOCKS * BLOCK), (a.trouble(), b.trouble())


@pytest.mark.parametrize("mode", ["0644", "short", "missing"])
def test_a_secret_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, mode: str) -> None:
    secret = tmp_path / "secret"
    if mode != "missing":
        secret.write_text("short" if mode == "short" else "0123456789abcdef")
        secret.chmod(0o644 if mode == "0644" else 0o600)
    settings = {"remote.url": "valkey://127.0.0.1:1", "remote.secret_file": secret}
    with pytest.raises(DaemonFailed, match=r"remote\.secret_file"), DaemonProcess(settings):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"remote.share": "none"}, r"remote\.share is set, but remote\.url is not"),
        ({"remote.url": "valkey://me:word@127.0.0.1"}, r"leave user and password out"),
        ({"remote.url": "http://127.0.0.1"}, r"valkey://host:port or redis://host:port"),
        ({"remote.url": "valkey://127.0.0.1", "remote.tls_ca": "/nowhere"}, r"write valkeys://"),
        (
            {"remote.url": "valkeys://127.0.0.1", "remote.tls_ca": "/nowhere"},
            r"remote\.tls_ca = /nowhere: No such file",
        ),
        ({"remote.url": "valkey://127.0.0.1/1", "remote.cluster": True}, r"names a database"),
        ({"remote.url": "s3://bucket", "remote.endpoint": "http://127.0.0.1"}, r"set remote\.insecure_http = true"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    if "remote.url" in settings:
        settings = settings | {"remote.secret_file": secret}
    with pytest.raises(DaemonFailed, match=message) as refused, DaemonProcess(settings):
        pass
    assert "word@" not in str(refused.value)


def test_certificates_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    new_certificates(tmp_path)
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "damaged").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"a password")
    locked = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password)
    (tmp_path / "locked.pem").write_bytes(locked)
    now = datetime.datetime.now(datetime.UTC)
    revoked = x509.CertificateRevocationListBuilder().issuer_name(x509.Name([])).last_update(now)
    revoked = revoked.next_update(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    (tmp_path / "revoked").write_bytes(revoked.public_bytes(serialization.Encoding.PEM))

    def started(**changed: str) -> DaemonProcess:
        files = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem"} | changed
        settings = {f"remote.{name}": tmp_path / file for name, file in files.items()}
        return DaemonProcess({"remote.url": "valkeys://127.0.0.1:1", "remote.secret_file": secret} | settings)

    with started():
        pass
    for name, file, message in (
        ("tls_ca", "text", r"remote\.tls_ca = .*/text has no certificate in PEM"),
        ("tls_ca", "damaged", r"remote\.tls_ca = .*/damaged has no certificate in PEM \(.*[^e]\)"),
        ("tls_ca", "revoked", r"remote\.tls_ca = .*/revoked has no certificate in PEM, only lists of revoked ones"),
        ("tls_cert", "ca.pem", r"ca\.pem and remote\.tls_key = .*key\.pem are not a certificate in PEM and its key"),
        ("tls_key", "locked.pem", r"remote\.tls_key = .*/locked\.pem are not .* without a password"),
        ("tls_key", "missing", r"remote\.tls_key = .*/missing: No such file.*give a PEM file"),
    ):
        with pytest.raises(DaemonFailed, match=message), started(**{name: file}):
            pass


def test_a_store_that_is_not_there_is_a_trouble_from_the_start(tmp_path: Path) -> None:
    with host(tmp_path / "a", f"valkey://127.0.0.1:{free_port()}", worker__embedded=False, gpu__bytes=0) as a:
        a.wait(a.trouble, TOLD_S, "the trouble is told")
        assert "cannot connect" in a.trouble()
