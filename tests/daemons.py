"""A small random model, daemons as processes with raw stubs on their sockets, and what every scenario has to leave."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import grpc
import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Role
from prefixd.cache import TieredCache
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.server.access.identities import Caller
from prefixd.server.rpc.receiving import CURRENT_CALL, Call
from prefixd.server.services.cache_service import PrefixCacheService
from prefixd.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.rig import OpenCache
from tests.waiting import WAIT_S, wait_until

BLOCK_TOKENS = 16
VOCAB_SIZE = 272

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


@dataclass
class Answer:
    """What a generation streamed."""

    accepted: inference_pb2.Accepted
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    ended: inference_pb2.SequenceFinished | None = None
    """Of one of several sequences."""

    def take(self, tokens: inference_pb2.Tokens) -> None:
        self.tokens += tokens.token_ids
        self.text += tokens.text
        self.logprobs += tokens.logprobs

    @property
    def hits(self) -> tuple[int, int, int]:
        """Hit tokens in the GPU, the CPU and the disk tier."""
        hits = self.finished.hit_tokens
        return hits.gpu, hits.cpu, hits.disk


class Remote:
    """Raw stubs on one address of a daemon."""

    def __init__(self, daemon: DaemonProcess, address: str | None = None) -> None:
        self.daemon = daemon
        self.channel = grpc.insecure_channel(address or daemon.address, options=_CHANNEL)
        self.cache: Any = cache_pb2_grpc.PrefixCacheStub(self.channel)
        self.inference: Any = inference_pb2_grpc.InferenceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def stats(self) -> admin_pb2.StatsResponse:
        return self.admin.Stats(admin_pb2.StatsRequest(), timeout=WAIT_S)

    def tier(self, tier: int) -> admin_pb2.TierStats:
        return next(stats for stats in self.stats().tiers if stats.tier == tier)

    def until(self, condition: Callable[[admin_pb2.StatsResponse], bool]) -> Any:
        """The first statistics for which `condition` holds."""
        seen: list[admin_pb2.StatsResponse] = []

        def holds() -> bool:
            seen[:] = [self.stats()]
            return condition(seen[0])

        wait_until(holds, lambda: f"last seen: {seen}")
        return seen[0]

    def settled(self) -> admin_pb2.StatsResponse:
        """Waits until nothing runs; fails unless everything that was taken or held has been given back."""

        def idle(stats: admin_pb2.StatsResponse) -> bool:
            quiet = not stats.leases and not stats.reservations
            quiet &= not stats.worker.running_requests and not stats.scheduler.waiting_requests
            return quiet and not any(
                tier.held_blocks or tier.in_flight_bytes or tier.quarantined_bytes for tier in stats.tiers
            )

        return self.until(idle)

    def evict(self, **what: Any) -> admin_pb2.EvictResponse:
        """What an eviction has come to when it is done."""
        *_, last = self.admin.Evict(admin_pb2.EvictRequest(**what))
        assert last.done
        return cast(admin_pb2.EvictResponse, last)

    def evict_all(self) -> None:
        """Drops everything there is; what is just being written back goes when that has ended."""
        wait_until(lambda: not self.evict(all=True).kept_blocks, "blocks stay")

    # -- generation -----------------------------------------------------------------------------------------------

    def begin(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str = "",
        salt: bytes = b"",
        model: str = "",
        n: int = 0,
        best_of: int = 0,
        beam_search: inference_pb2.BeamSearch | None = None,
        retention: Sequence[cache_pb2.Retention] = (),
        **sampling: Any,
    ) -> Any:
        """The stream of a generation; sampled with a fixed seed, so that a wrong logit shows."""
        chosen = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True, **sampling}
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            salt=salt,
            model=model,
            n=n,
            best_of=best_of,
            beam_search=beam_search,
            retention=retention,
            sampling=inference_pb2.SamplingParams(**chosen),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids = token_bytes(prompt)
        return self.inference.Generate(request, timeout=2 * WAIT_S)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        return collect(self.begin(prompt, **options))

    def sequences(self, prompt: str | Sequence[int], **options: Any) -> list[Answer]:
        """The answers of a request for several, by number; all have its first and its last event."""
        accepted, *events, last = self.begin(prompt, **options)
        answers: dict[int, Answer] = {}
        for event in events:
            if event.WhichOneof("event") == "tokens":
                answer = answers.setdefault(event.tokens.index, Answer(accepted.accepted, finished=last.finished))
                assert answer.ended is None, "a sequence's end is its last event"
                answer.take(event.tokens)
            else:
                answer = answers[event.sequence_finished.index]
                answer.ended = event.sequence_finished
                assert answer.ended.output_tokens == len(answer.tokens)
        assert all(answer.ended is not None for answer in answers.values())
        return [answers[index] for index in range(len(answers))]

    def generate_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """All at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.generate(prompt, **options), prompts))

    # -- engines' side ----------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, name: str = "test") -> Iterator[cache_pb2.SessionOpened]:
        stream = self.cache.OpenSession(cache_pb2.OpenSessionRequest(client_name=name, pid=os.getpid()))
        try:
            yield next(stream).opened
        finally:
            stream.cancel()

    def map_arena(self, session: str) -> None:
        """Has this process count as one that has the arena: else a session reserves nothing."""
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(WAIT_S)
            door.connect(f"{self.daemon.socket}-memory")
            door.sendall(session.encode() + b"\n")
            assert b"arena_bytes" in door.recv(4096)

    def register(
        self, session: str, name: str, *part_bytes: int, block_tokens: int = 4, salt: bytes = b"", **fields: Any
    ) -> bytes:
        parts = [cache_pb2.Part(group=f"g{i}", nbytes=nbytes) for i, nbytes in enumerate(part_bytes)]
        wanted = cache_pb2.Namespace(name=name, salt=salt, block_tokens=block_tokens, parts=parts, **fields)
        request = cache_pb2.RegisterNamespaceRequest(namespace=wanted, session_id=session)
        return self.cache.RegisterNamespace(request).namespace_id

    def match(self, session: str, namespace: bytes, tokens: Sequence[int]) -> cache_pb2.MatchResponse:
        request = cache_pb2.MatchRequest(session_id=session, namespace_id=namespace, token_ids=token_bytes(tokens))
        return self.cache.Match(request)

    def put(self, session: str, namespace: bytes, tokens: Sequence[int], data: bytes, **header: Any) -> Any:
        first = cache_pb2.PutHeader(session_id=session, namespace_id=namespace, token_ids=token_bytes(tokens), **header)
        messages = [cache_pb2.PutRequest(header=first)]
        messages += [cache_pb2.PutRequest(data=data[i : i + 50_000]) for i in range(0, len(data), 50_000)]
        return self.cache.Put(iter(messages), timeout=WAIT_S)

    def get(self, session: str, namespace: bytes, tokens: Sequence[int], **request: Any) -> tuple[int, bytes]:
        """Blocks and bytes."""
        messages = list(
            self.cache.Get(
                cache_pb2.GetRequest(
                    session_id=session, namespace_id=namespace, token_ids=token_bytes(tokens), **request
                ),
                timeout=WAIT_S,
            )
        )
        return messages[0].header.blocks, b"".join(message.data for message in messages[1:])


def collect(stream: Any) -> Answer:
    """Everything a generation streams; checks that its events come in order."""
    answer = Answer(next(stream).accepted)
    last = ""
    for event in stream:
        assert last != "finished"
        last = event.WhichOneof("event")
        if last == "tokens":
            answer.take(event.tokens)
        else:
            assert last == "finished"
            answer.finished = event.finished
    assert last == "finished"
    assert answer.finished.output_tokens == len(answer.tokens)
    return answer


def token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """`prompt(n, k)`: n token ids that no other test uses; prompts of one test and one k share their beginning."""

    def make(tokens: int, variant: int = 0) -> list[int]:
        seed = [*request.node.nodeid.encode(), variant]
        return np.random.default_rng(seed).integers(0, 256, 4096)[:tokens].tolist()

    return make


@pytest.fixture(scope="session")
def refused() -> Callable[..., Any]:
    """`with refused("NOT_FOUND", "words", ...)`: the call fails with this status, and its message has the words."""

    @contextmanager
    def expect(status: str, *words: str) -> Iterator[None]:
        with pytest.raises(grpc.RpcError) as caught:
            yield
        details = caught.value.details()
        assert caught.value.code() is grpc.StatusCode[status], details
        for word in words:
            assert re.search(word, details), f"{word!r} is not in {details!r}"

    return expect


@pytest.fixture(scope="session")
def model_directory() -> Iterator[Path]:
    """A Llama of 2 layers with random weights (512 bytes of KV a token) and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
        tie_word_embeddings=False,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory = Path(tempfile.mkdtemp(prefix="prefixd-model-"))
    try:
        LlamaForCausalLM(config).save_pretrained(directory)
        template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(directory)
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def with_model(model_directory: Path) -> dict[str, str | int]:
    """Settings of a daemon with the small model: 128 frames of 8 KiB."""
    return {
        "worker.model": str(model_directory),
        "worker.threads": 1,
        "gpu.bytes": "1MiB",
        "gpu.device": "cpu",
        "cpu.bytes": "16MiB",
        "disk.bytes": "64MiB",
        # This model computes faster than a disk reads.
        "scheduler.load": "always",
    }


@pytest.fixture
async def cache() -> AsyncIterator[TieredCache]:
    """A cache of 1 MiB of CPU memory, in this process."""
    async with OpenCache(cpu_bytes=1 << 20, clock=time.monotonic) as opened:
        yield opened.cache


class AnybodyCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Takes everybody for one caller."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        CURRENT_CALL.set(Call(self._caller))
        return await continuation(handler_call_details)


@pytest.fixture
async def cache_server(cache: TieredCache) -> AsyncIterator[grpc.aio.Server]:
    """PrefixCache of `cache`, in this process; it has no port yet, and is not started."""
    made = grpc.aio.server(interceptors=[AnybodyCalls(Caller(cache.tenants.default, Role.CLIENT, "test", "unix"))])
    service = PrefixCacheService(cache, None, asyncio.Event())
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(service, made)
    yield made
    await made.stop(None)


@pytest.fixture
def engine(remote: Remote) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs code in a process of its own, with `client`, `cache` (prefixd.client), `tokens` (42) and bytes for them.

    `engine("client's name namespace's name", code)`; a block has 4 tokens and parts of 96 and 5000 bytes, `kv` has 10
    blocks. The process then waits until it is killed. It connects to `address`, the daemon's unless said otherwise.
    """
    running: list[subprocess.Popen[str]] = []

    def start(name: str, code: str, address: str | None = None) -> subprocess.Popen[str]:
        program = f"""
            import sys, time, numpy as np
            from prefixd.client import Client, NamespaceSpec, PartSpec
            kv = np.random.default_rng(5).integers(0, 256, 50960, dtype=np.uint8)
            tokens = list(range(42))
            client = Client({address or remote.daemon.address!r}, name={name!r})
            parts = (PartSpec("g0", 0, 96), PartSpec("g1", 0, 5000))
            cache = client.register(NamespaceSpec({name!r}.partition(" ")[2], 4, parts))
        """
        end = "\nprint(flush=True); sys.stdin.readline()"
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(code) + end],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Remote]]:
    """`launch(settings)` starts a daemon that ends with the module's last test."""
    running: list[Remote] = []

    def start(settings: dict[str, str | int], *, kind: type[DaemonProcess] = DaemonProcess, **options: Any) -> Remote:
        daemon = kind(settings, **options)
        daemon.__enter__()
        running.append(Remote(daemon))
        return running[-1]

    yield start
    for remote in running:
        remote.channel.close()
        remote.daemon.__exit__(None, None, None)


@pytest.fixture(scope="session")
def model_daemon(with_model: dict[str, str | int]) -> Iterator[Remote]:
    """A daemon with the small model that many modules share; it has metrics, and loads prefixes layer by layer."""
    settings = {**with_model, "gpu.bytes": "4MiB", "server.metrics": "127.0.0.1:0", "worker.layerwise_loads": "always"}
    settings["server.http"] = "127.0.0.1:0"
    with DaemonProcess(settings) as daemon, Remote(daemon) as remote:
        ready = admin_pb2.WorkerStats.STATE_READY
        remote.until(lambda stats: stats.worker.state == ready and all(model.namespace for model in stats.models))
        yield remote


@pytest.fixture(scope="session")
def serve_failing() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `prefixd serve` with settings it cannot start with, to its end."""

    def run(settings: dict[str, str | int]) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXD_")}
        return subprocess.run(
            [sys.executable, "-m", "prefixd", "serve", *(f"--set={name}={value}" for name, value in settings.items())],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run
