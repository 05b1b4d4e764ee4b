"""Attacks on the daemon's ports and sockets, the sockets' directory, the audit log and the operator's terminal."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.checks.attacks.attacker import Given, Mallory, refusal, varint
from benchmarks.checks.attacks.people import ALICE, MALLORY
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import Scene
from benchmarks.common.harness import wait_until
from prefixd.cache import BlockChain
from prefixd.client import AsyncClient, Client, ClientError, NamespaceSpec, PartSpec
from prefixd.v1 import cache_pb2, inference_pb2
from prefixd.v1.cache_pb2_grpc import PrefixCacheStub

_SPEC = NamespaceSpec("secret-model", 16, (PartSpec("full", 0, 1024),))
_PLAN_KIB, _PLAN_S = 8 << 20, 60
_SECRET = np.arange(1_000_000, 1_000_064, dtype=np.uint32)


class IdleMetrics(Scenario):
    """Opens 1,000 silent connections to the metrics port of a daemon that may open 1,024 files."""

    name = "idle metrics connections"
    closed_by = "tests/server/http/test_http_listener.py"

    async def attack(self, mallory: Mallory) -> None:
        _allow_files(4096)
        sockets: list[socket.socket] = []
        mallory_opened = 0
        for _ in range(1000):
            with suppress(OSError):
                sockets.append(socket.create_connection(("127.0.0.1", mallory.metrics_port), timeout=1.0))
                mallory_opened += 1
            await asyncio.sleep(0)
        mallory.in_place(opened=mallory_opened)
        while mallory.going:
            for _ in range(20):
                sockets.pop(0).close()
                with suppress(OSError):
                    sockets.append(socket.create_connection(("127.0.0.1", mallory.metrics_port), timeout=1.0))
            await asyncio.sleep(0.1)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        clients: list[Client] = []
        try:
            for _ in range(8):
                client = scene.client()
                clients.append(client)
                client.register(_SPEC)
        except ClientError as error:
            yield f"other tenants get no session: {refusal(error)}"
        finally:
            for client in clients:
                client.close()


class OpenMetrics(Scenario):
    """Reads the metrics without a credential, as any user of the host."""

    name = "metrics without credentials"

    async def attack(self, mallory: Mallory) -> None:
        url = f"http://127.0.0.1:{mallory.metrics_port}/metrics"
        try:
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
            mallory.in_place(nbytes=len(page), names=page.count(b"prefixd_"))
        except urllib.error.HTTPError as error:
            mallory.in_place(status=error.code)
        await mallory.until_stopped()

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        if facts.get("names"):
            yield f"a user without a credential reads {facts['names']} lines of figures"


class Strangers(Scenario):
    """Asks for the daemon's health without a credential: with 15 MiB, with no message, and without an end."""

    name = "strangers"
    closed_by = "tests/server/rpc/test_anonymous.py"

    async def attack(self, mallory: Mallory) -> Given:
        counted: Counter[str] = Counter()
        large = b"\n" + varint(15 << 20) + bytes(15 << 20)  # the service's name

        async def silence() -> AsyncIterator[bytes]:
            await mallory.until_stopped()
            yield b""

        async def ask(channel: Any, method: str, message: bytes | None) -> None:
            path = f"/grpc.health.v1.Health/{method}"
            while mallory.going:
                silent = message is None
                call = (channel.stream_stream if silent else channel.unary_stream)(path)
                counted[(await call(silence() if silent else message, timeout=20).code()).name] += 1

        several = [("Check", large), ("Watch", large), ("Check", None), ("Watch", b"")]
        sent = [several] * 8 + [[("Watch", b"")] * 8] * 8
        channels = await mallory.channels(len(sent))
        asking = (ask(channel, *call) for channel, each in zip(channels, sent, strict=True) for call in each)
        await mallory.run_all(asking)
        return dict(counted)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        token = [("authorization", f"Bearer {scene.token(ALICE)}")]
        for caller, address, metadata in (("the operator", scene.daemon.address, []), ("a tenant", scene.tcp, token)):
            with grpc.insecure_channel(address) as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                try:
                    health.Check(health_pb2.HealthCheckRequest(), timeout=5.0, metadata=metadata)
                    next(health.Watch(health_pb2.HealthCheckRequest(), timeout=5.0, metadata=metadata))
                except grpc.RpcError as error:
                    yield f"{caller} does not learn of the daemon's health: {error.code().name}: {error.details()}"


class UnreadAnswers(Scenario):
    """Makes calls and gives their answers no window: Health with and without a token, and Generate of one token."""

    name = "unread answers"

    async def attack(self, mallory: Mallory) -> Given:
        counted: Counter[str] = Counter()
        unread: list[Any] = []

        async def ask(channel: Any, path: str, message: bytes, metadata: list[tuple[str, str]]) -> None:
            while mallory.going:
                call = channel.unary_stream(path)(message, metadata=metadata, timeout=300)
                await call.initial_metadata()  # comes with the answer, or a refusal
                if call.done():
                    counted[f"{path} {(await call.code()).name}"] += 1
                    await asyncio.sleep(0.1)
                else:
                    counted[f"{path} unread"] += 1
                    unread.append(call)

        token = [("authorization", f"Bearer {mallory.token}")]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=np.arange(1, 9, dtype="<u4").tobytes()),
            sampling=inference_pb2.SamplingParams(max_tokens=1),
        ).SerializeToString()
        health, generate = "/grpc.health.v1.Health/Check", "/prefixd.v1.Inference/Generate"
        sent = [(health, b"", token)] * 30 + [(health, b"", [])] * 6 + [(generate, request, token)] * 4
        channels = await mallory.channels(len(sent), unread=True)
        asking = [ask(channel, *call) for channel, call in zip(channels, sent, strict=True)]
        await mallory.run_all(asking, in_place_s=20.0)
        return dict(counted)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        with Client(scene.tcp, name="alice", token=scene.token(ALICE), memory="streamed", timeout_s=20.0) as alice:
            try:
                alice.register(_SPEC).match(_SECRET)
            except ClientError as error:
                yield f"a new client is refused: {refusal(error)}"


class LocalAdmin(Scenario):
    """Calls Admin at the unix socket as a user that may connect there but is not the operator."""

    name = "Admin at the unix socket"
    as_other_user = True

    def prepare(self, scene: Scene) -> Given:
        with scene.client() as victim:
            cache = victim.register(_SPEC)
            cache.store(_SECRET, np.zeros(4 * 1024, np.uint8))
            seed = int.from_bytes(cache.namespace_id, "little")
        return {"key": BlockChain(_SECRET.tobytes(), 16, seed).key(3).hex()}

    async def attack(self, mallory: Mallory) -> None:
        client = await mallory.client("unix")
        did: list[str] = []
        refused: list[str] = []

        async def attempt(name: str, call: object) -> None:
            try:
                answer = await call  # type: ignore[misc]
                did.append(name)
                if name == "inspect":
                    ids = [token for block in answer.blocks for token in block.token_ids]
                    did.append(f"read {sum(1 for token in ids if token in _SECRET)} of a victim's token ids")
            except ClientError as error:
                refused.append(refusal(error))

        key = mallory.given["key"]
        await attempt("stats", client.stats())
        await attempt("ls", client.prefixes(limit=1000))
        for answer_key in (key, *await _keys(client)):
            await attempt("inspect", client.inspect(answer_key))
            if "inspect" in did:
                break
        await attempt("pin", client.pin(key))
        await attempt("unpin", client.unpin(key))
        await attempt("evict", client.evict(key=key))
        await attempt("drain", client.drain(timeout_s=5.0))
        await mallory.hold(did=did, refused=refused[:2])

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        if done := [name for name in facts.get("did", ()) if name not in ("stats",)]:
            yield f"a user that is not the operator could: {', '.join(done)}"


async def _keys(client: AsyncClient) -> list[str]:
    try:
        return [
            prefix.key for prefix in (await client.prefixes(limit=1000)).prefixes if "secret" in prefix.namespace_name
        ]
    except ClientError:
        return []


class NoTicket(Scenario):
    """Calls at the unix socket without a ticket: it must not get the rights of another tenant."""

    name = "no ticket"
    as_other_user = True

    async def attack(self, mallory: Mallory) -> None:
        """Opens a session by gRPC alone; the SDK would fetch a ticket first."""
        async with grpc.aio.insecure_channel(mallory.unix) as channel:
            stub: Any = PrefixCacheStub(channel)
            stream = stub.OpenSession(cache_pb2.OpenSessionRequest(client_name="nobody"))
            try:
                event = await stream.read()
                mallory.in_place(opened=event is not grpc.aio.EOF, tenant=getattr(event.opened, "tenant", ""))
            except grpc.aio.AioRpcError as error:
                mallory.in_place(refused=refusal(error))
            await mallory.until_stopped()
            stream.cancel()

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        if facts.get("opened") and facts["tenant"] != MALLORY.name:
            yield f"a user of the tenant mallory has a session of the tenant {facts['tenant'] or '(none)'}"


class MemoryDoor(Scenario):
    """Opens silent connections to the socket that hands out the memory: honest engines must still get the memory."""

    name = "memory door"
    as_other_user = True

    async def attack(self, mallory: Mallory) -> None:
        """Keeps 300 connections open, and replaces those that are closed."""
        _allow_files(4096)
        path = mallory.unix.removeprefix("unix:") + "-memory"
        silent: list[socket.socket] = []
        refused = ""

        def fill() -> None:
            nonlocal refused
            silent[:] = [each for each in silent if not _is_closed(each)]
            while len(silent) < 300:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.setblocking(False)
                try:
                    connection.connect(path)
                except OSError as error:
                    connection.close()
                    refused = str(error)
                    return
                silent.append(connection)

        for _ in range(20):
            fill()
            await asyncio.sleep(0.05)
        mallory.in_place(open=len(silent), refused=refused)
        while mallory.going:
            fill()
            await asyncio.sleep(0.01)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        for _ in range(3):
            try:
                with Client(scene.daemon.address, name="engine", memory="shared", timeout_s=10.0) as client:
                    client.register(_SPEC)
            except ClientError as error:
                yield f"an honest engine does not get the memory: {refusal(error)}"
                return


class SocketDirectory(Scenario):
    """Without XDG_RUNTIME_DIR the socket is in /tmp/prefixd-UID: the attacker makes that directory first, to get a
    victim's calls."""

    name = "socket directory"
    as_other_user = True

    async def attack(self, mallory: Mallory) -> Given:
        """Makes the directory of a user that has no daemon yet, and listens there."""
        folder = Path(f"/tmp/prefixd-{ALICE.uid}")
        calls = 0

        def visited(_reader: object, writer: asyncio.StreamWriter) -> None:
            nonlocal calls
            calls += 1
            writer.close()

        folder.mkdir(0o755)
        try:
            server = await asyncio.start_unix_server(visited, folder / "prefixd.sock")
            (folder / "prefixd.sock").chmod(0o777)
            await mallory.hold(listening=True)
            server.close()
        finally:
            shutil.rmtree(folder)
        return {"calls": calls}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PREFIXD_"))}
        command = [sys.executable, "-m", "benchmarks.checks.attacks.default_client", str(ALICE.uid)]
        subprocess.run(command, capture_output=True, env=environment, timeout=60)
        return ()

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        if found.get("calls"):
            yield "a client with the default address calls a socket that another user has made"


class Connections(Scenario):
    """Keeps as many connections to the TCP port as it can, all from one host, and sends nothing on some."""

    name = "connections of one host"
    closed_by = "tests/server/rpc/sockets/test_tcp_connections.py"

    async def attack(self, mallory: Mallory) -> Given:
        """Connects from another address of this machine, and replaces connections that are closed."""
        host, _, port = mallory.tcp.rpartition(":")
        open_now: set[asyncio.Task[None]] = set()
        made = 0

        async def keep() -> None:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
                try:
                    # The HTTP/2 preface and an empty SETTINGS frame: from then on gRPC counts this as a connection.
                    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                    while await reader.read(1 << 12):
                        pass
                finally:
                    writer.close()

        deadline = asyncio.get_running_loop().time() + 2.0
        while mallory.going:
            while len(open_now) < 700:
                made += 1
                task = asyncio.create_task(keep())
                open_now.add(task)
                task.add_done_callback(open_now.discard)
            await asyncio.sleep(0.2)
            if asyncio.get_running_loop().time() > deadline:
                mallory.in_place()
        for task in open_now:
            task.cancel()
        return {"made": made}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        """Checks that another host can connect most times: the attacker connects faster than it is cut off."""
        refused = 0
        for _ in range(5):
            found = scene.newcomer()
            refused += bool(found)
            time.sleep(0.2)
        if refused > 2:
            yield f"another host is shut out {refused} of 5 times: {found}"


class AuditLog(Scenario):
    """The audit log is in a directory such as /tmp, where others can write. When the operator renames the log, the
    attacker puts a link to another file of the daemon's user in its place."""

    name = "audit log"
    as_other_user = True
    closed_by = "tests/server/access/test_audit.py"

    def daemon_settings(self, folder: Path) -> Mapping[str, object]:
        logs = folder / "logs"
        logs.mkdir()
        logs.chmod(0o1777)
        (folder / "precious").write_text("precious")
        return {"server.audit_log": logs / "audit.log"}

    def prepare(self, scene: Scene) -> Given:
        return {"log": str(scene.daemon.directory.parent / "logs" / "audit.log")}

    async def attack(self, mallory: Mallory) -> Given:
        path = Path(mallory.given["log"])
        mallory.in_place(waiting=True)
        linked = False
        while mallory.going:
            if not os.path.lexists(path):
                path.symlink_to(path.parent.parent / "precious")
                linked = True
            await asyncio.sleep(0.005)
        return {"linked": linked}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        folder = scene.daemon.directory.parent
        log = folder / "logs" / "audit.log"
        log.rename(log.with_suffix(".1"))
        wait_until(lambda: os.path.lexists(log), 10.0, 0.01)
        os.kill(scene.daemon.pid, signal.SIGHUP)
        time.sleep(0.5)
        scene.evict(MALLORY)
        yield from scene.newcomer()

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        if not found.get("linked"):
            yield "no link was put in place of the log: the attack did not take place"
        if (scene.daemon.directory.parent / "precious").read_text() != "precious":
            yield "the audit log is written into another file of the daemon's user"


class Terminal(Scenario):
    """Sends names with control characters, which could reach the terminal of an operator that asks for the figures."""

    name = "operator's terminal"
    escape = "\x1b]0;owned\x07\x1b[2J\nprefixd: all is well\r\x9b31m\u202e"

    async def attack(self, mallory: Mallory) -> None:
        """Puts them into the names of a session, a namespace and a part."""
        client = await mallory.client(name="session" + self.escape)
        refused: list[str] = []
        try:
            await client.session()
        except ClientError as error:
            refused.append(refusal(error))
            client = await mallory.client()
        for name, group in (("space" + self.escape, "full"), ("part", "group" + self.escape)):
            try:
                cache = await client.register(NamespaceSpec(name, 16, (PartSpec(group, 0, 1024),)))
                await cache.store(np.arange(16, dtype=np.uint32), np.zeros(1024, np.uint8))
            except ClientError as error:
                refused.append(refusal(error))
        await mallory.hold(refused=refused[:2])

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
        for command in (["stats"], ["ls"], ["doctor"]):
            done = subprocess.run(
                [sys.executable, "-m", "prefixd", *command, "--address", scene.daemon.address],
                capture_output=True,
                text=True,
                env=environment,
                timeout=60,
            )
            text = done.stdout + done.stderr
            if bad := sorted({character for character in text if character in "\x1b\x07\x9b\r\u202e"}):
                yield f"`prefixd {' '.join(command)}` writes {', '.join(map(repr, bad))} to the terminal"
            if any(line.startswith("prefixd: all is well") for line in text.splitlines()):
                yield f"`prefixd {' '.join(command)}` writes a line of the attacker's"
        log = scene.daemon.log.read_bytes()
        if b"\x1b" in log:
            yield "control characters are in the daemon's log"


class HostileTraces(Scenario):
    """Traces that `prefixd plan` must refuse with one line, or plan within its limits."""

    name = "hostile plans"
    closed_by = "tests/cli/commands/test_plan.py"
    lines = (
        '{"timestamp": 1e308, "input_length": 1e300, "output_length": NaN, "hash_ids": [-1]}',
        f'{{"timestamp": 0, "input_length": 512000, "output_length": {(1 << 32) - 1}, "hash_ids": {[*range(1000)]}}}',
        '{"\x1b]0;owned\x07": "\x1b[2J"}',
    )

    async def attack(self, mallory: Mallory) -> None:
        await mallory.hold(lines=self.lines)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        with tempfile.TemporaryDirectory() as folder:
            for number, line in enumerate(facts["lines"]):
                trace = Path(folder) / f"trace{number}.jsonl"
                trace.write_text(line + "\n")
                if fault := _run_plan(trace):
                    yield f"`prefixd plan` of trace {number} {fault}"


def _run_plan(trace: Path) -> str:
    """Returns what `prefixd plan` does wrong with a trace; empty if nothing."""
    plan = [sys.executable, "-m", "prefixd", "plan", "--trace", str(trace), "--model", "llama-3.1-8b"]
    plan += ["--gpu", "1GiB", "--cpu", "1GiB", "--disk", "1GiB"]
    limited = ["sh", "-c", f'ulimit -v {_PLAN_KIB}; exec nice "$@"', "sh", *plan]
    try:
        done = subprocess.run(limited, capture_output=True, text=True, timeout=_PLAN_S)
    except subprocess.TimeoutExpired:
        return f"takes longer than {_PLAN_S} s"
    if "Traceback" in done.stderr or done.returncode < 0:
        return f"crashes: {done.stderr.strip().splitlines()[-1:]}"
    if "\x1b" in done.stdout + done.stderr:
        return "writes control characters of the trace"
    return ""


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count, hard)), hard))


def _is_closed(connection: socket.socket) -> bool:
    try:
        if connection.recv(1) == b"":
            connection.close()
            return True
    except BlockingIOError:
        return False
    except OSError:
        connection.close()
        return True
    return False
