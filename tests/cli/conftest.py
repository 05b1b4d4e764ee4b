"""A daemon that only answers: enough to see what each command asks for and prints."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from prefixd.cli.app import app
from prefixd.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, inference_pb2, inference_pb2_grpc

KEY = "9f86d081884c7d659a2feaa0c55ad015"
NAMESPACE = bytes(range(8))


class FakeDaemon(admin_pb2_grpc.AdminServicer, inference_pb2_grpc.InferenceServicer):
    """Keeps every request; answers with fixed figures."""

    def __init__(self, address: str) -> None:
        self.no_disk = ""  # why pins do not outlast a restart
        self.address = address
        self.requests: list[Any] = []
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.fails_after = 0  # calls that are answered before it
        self.answers = True  # errors are marked as a daemon's own
        self.damage = False
        self.set_aside = False
        self.troubles = True
        self.references = 5000  # sampled blocks of the ghosts
        self.filled = True
        self.worker_error = ""
        self.held = ""
        self.silent = False  # what is generated has no text
        self.tenants = [""]  # each has a namespace of the same name
        # Generations, resizes and verifications go on until they are cancelled.
        self.endless = False
        self.asked = threading.Event()
        self.cancelled = threading.Event()

    def last(self) -> Any:
        return self.requests[-1]

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.asked.set()
        if self.failure is not None and len(self.requests) > self.fails_after:
            if self.answers:
                context.set_trailing_metadata((("prefixd-answered", "yes"),))
            context.abort(*self.failure)

    def Stats(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.StatsResponse:
        self._note(request, context)
        named = cache_pb2.Namespace(name="tiny-llama", block_tokens=16)
        tier = admin_pb2.TierStats(
            tier=cache_pb2.TIER_DISK,
            capacity_bytes=4 << 30,
            used_bytes=1 << 30,
            blocks=4096,
            hit_tokens=12345,
            quarantined_bytes=3 << 20,
        )
        elastic = admin_pb2.TierStats(
            tier=cache_pb2.TIER_GPU,
            capacity_bytes=6 << 30,
            least_bytes=1 << 30,
            most_bytes=12 << 30,
            target_bytes=8 << 30,
            resized_because="requests need it",
        )
        return admin_pb2.StatsResponse(
            version="0.1.0",
            uptime_s=90,
            tiers=[tier, elastic],
            namespaces=[
                admin_pb2.NamespaceStats(
                    namespace_id=bytes([NAMESPACE[0] + number]) + NAMESPACE[1:],
                    namespace=named,
                    blocks=4096,
                    tenant=tenant,
                )
                for number, tenant in enumerate(self.tenants)
            ],
            sessions=[admin_pb2.SessionStats(session_id="s1", client_name="vllm", pid=77, leases=3)],
            worker=admin_pb2.WorkerStats(
                state=admin_pb2.WorkerStats.STATE_READY,
                model="embedded",
                device="cpu",
                block_tokens=1024,
                block_tokens_asked=16,
                block_tokens_reason="16 tokens asked, 1024 used: a token takes 2 KiB",
                error=self.worker_error,
                kv="virtual",
                layout="token",
                cuda_graphs_reason="the model has several groups of layers; CUDA graphs need one",
                states=admin_pb2.StateStats(
                    kept_states=7, kept_bytes=14 << 20, resumed_runs=3, resumed_tokens=4500, runs_without_room=2
                ),
                passes=1200,
                draft=admin_pb2.DraftStats(model="small", draft_tokens=4, proposed_tokens=4000, accepted_tokens=3000),
            ),
            scheduler=admin_pb2.SchedulerStats(
                policy="relaxed-fpf",
                waiting_requests=5,
                preempted_requests=3,
                swapped_requests=2,
                swapped_blocks=40,
                recomputed_requests=1,
                recomputed_tokens=1234,
                resumed_requests=4,
            ),
            asked_tokens=1000,
            hit_tokens=750,
            lost_blocks={"checksum": 2},
            troubles=[
                admin_pb2.Trouble(part="disk tier", what="the file system is full", remedy="free space", since_s=90)
            ],
            scrub=admin_pb2.ScrubStats(checked_blocks=5000, checked_bytes=3 << 30, damaged_blocks=1, passes=2),
            write_back=admin_pb2.WriteBackStats(queued_blocks=7, queued_bytes=7 << 20, limit_bytes=64 << 20),
            namespace_room=admin_pb2.NamespaceRoomStats(
                used_bytes=48 << 20, limit_bytes=64 << 20, forgotten_namespaces=12_345, refused_namespaces=7
            ),
            kv_events=admin_pb2.KvEventStats(events=9000, batches=1200, overruns=1, subscriptions=2),
        )

    def ListPrefixes(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.ListPrefixesResponse:
        self._note(request, context)
        prefix = admin_pb2.PrefixInfo(
            key=KEY,
            namespace_id=NAMESPACE,
            namespace_name="tiny-llama",
            blocks=32,
            tokens=512,
            nbytes=8 << 20,
            gpu_blocks=30,
            disk_blocks=2,
            idle_s=3,
            pinned=True,
            hits=41,
        )
        return admin_pb2.ListPrefixesResponse(prefixes=[prefix], total=7, pinned_blocks=32, pinned_bytes=8 << 20)

    def Warm(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.WarmResponse:
        self._note(request, context)
        if request.key.endswith("/dead"):
            context.set_trailing_metadata((("prefixd-answered", "yes"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "no prefix has the key dead")
        found = [
            cache_pb2.TierRun(tier=cache_pb2.TIER_CPU, blocks=1),
            cache_pb2.TierRun(tier=cache_pb2.TIER_REMOTE, blocks=2),
        ]
        return admin_pb2.WarmResponse(blocks=4, found=found, brought=1, left=1)

    def Inspect(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.InspectResponse:
        self._note(request, context)
        block = admin_pb2.BlockInfo(
            index=0,
            key=KEY,
            tiers=[cache_pb2.TIER_GPU, cache_pb2.TIER_DISK],
            children=2,
            held=1,
            nbytes=256 << 10,
            token_ids=[1000, 1001, 1002],
            priority=50,
            priority_s=3600,
            text="Once upon" if request.text else None,
        )
        return admin_pb2.InspectResponse(
            prefix=admin_pb2.PrefixInfo(key=KEY, namespace_name="tiny-llama", blocks=1, tokens=16),
            blocks=[block],
        )

    def Why(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.WhyResponse:
        self._note(request, context)
        sentence = "The first token came after 2.00 s."
        info = admin_pb2.RequestInfo(id="r7-4be2a0", method="Generate", cause="evicted", sentence=sentence)
        return admin_pb2.WhyResponse(requests=[info] if request.request_id or request.last > 1 else [])

    def Pin(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.PinResponse:
        self._note(request, context)
        return admin_pb2.PinResponse(blocks=32, durable=not self.no_disk, reason=self.no_disk)

    def Unpin(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.UnpinResponse:
        self._note(request, context)
        return admin_pb2.UnpinResponse(blocks=31, durable=not self.no_disk, reason=self.no_disk)

    def Evict(self, request: Any, context: grpc.ServicerContext) -> Iterator[admin_pb2.EvictResponse]:
        self._note(request, context)
        yield admin_pb2.EvictResponse(evicted_blocks=20, total_blocks=42)
        yield admin_pb2.EvictResponse(evicted_blocks=40, kept_blocks=2, total_blocks=42, done=True)

    def ResizeTier(self, request: Any, context: grpc.ServicerContext) -> Iterator[admin_pb2.ResizeTierResponse]:
        if self.endless:
            context.add_callback(self.cancelled.set)  # before the caller has anything that it could cancel
        self._note(request, context)
        sizes = {"before_bytes": 8 << 30, "target_bytes": request.nbytes}
        yield admin_pb2.ResizeTierResponse(nbytes=6 << 30, **sizes)
        if self.endless:
            self.cancelled.wait(100)
        last = {"nbytes": 5 << 30, "unfinished": self.held} if self.held else {"nbytes": request.nbytes}
        yield admin_pb2.ResizeTierResponse(evicted_blocks=30, demoted_blocks=20, done=True, **last, **sizes)

    def WhatIf(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.WhatIfResponse:
        self._note(request, context)
        rates = {0.25: 0.2, 0.5: 0.3, 1.0: 0.4, 1.5: 0.44, 2.0: 0.466, 8.0: 0.6}
        sizes = [
            admin_pb2.GhostSize(
                factor=factor, nbytes=int(factor * (64 << 30)), hit_rate=rate, margin=0.012, filled=self.filled
            )
            for factor, rate in rates.items()
        ]
        tier = admin_pb2.GhostTier(
            tier=cache_pb2.TIER_CPU,
            nbytes=64 << 30,
            policy="lru",
            sampled_share=0.025,
            references=self.references,
            sure=self.references >= 1000,
            measured_hit_rate=0.41,
            sizes=sizes,
            policy_hit_rates={"weighing": 0.45, "lfu": 0.39},
        )
        ghosts = admin_pb2.GhostStats(watched_s=7980, asked_tokens=10_000_000, tiers=[tier], skipped_prompts=3)
        return admin_pb2.WhatIfResponse(ghosts=ghosts, token_s=1e-4)

    def RecordTrace(self, request: Any, context: grpc.ServicerContext) -> Iterator[admin_pb2.RecordedRequests]:
        self._note(request, context)
        yield admin_pb2.RecordedRequests()
        late, early = (
            admin_pb2.RecordedRequest(arrival_s=at_s, prompt_tokens=1100, output_tokens=7, hashes=hashes)
            for at_s, hashes in ((2.0, [1 << 63, 5]), (1.0, [1 << 63, 9]))
        )
        yield admin_pb2.RecordedRequests(requests=[late, early], dropped_requests=1)
        if self.endless:
            self.cancelled.wait(100)
        yield admin_pb2.RecordedRequests(dropped_requests=1, done=True)

    def Flush(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.FlushResponse:
        self._note(request, context)
        return admin_pb2.FlushResponse(blocks=12, nbytes=3 << 20, left_blocks=5, left_bytes=1 << 20)

    def Drain(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.DrainResponse:
        self._note(request, context)
        return admin_pb2.DrainResponse(written_blocks=5, finished_requests=1)

    def Undrain(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.UndrainResponse:
        self._note(request, context)
        return admin_pb2.UndrainResponse(was_draining=True)

    def FindPrefix(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.FindPrefixResponse:
        self._note(request, context)
        return admin_pb2.FindPrefixResponse(key=f"{NAMESPACE.hex()}/{KEY}", tokens=512, prompt_tokens=530)

    def CheckIntegrity(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.CheckIntegrityResponse:
        self._note(request, context)
        if self.set_aside:
            what = "40 blocks are lost, because their index was set aside"
            trouble = admin_pb2.Trouble(part="disk index", what=what, remedy="run `prefixd recover`", since_s=5)
            return admin_pb2.CheckIntegrityResponse(troubles=[trouble])
        full = admin_pb2.Trouble(part="disk tier", what="the disk is full", remedy="free some space", since_s=90)
        return admin_pb2.CheckIntegrityResponse(
            violations=["cpu tier: slots with several owners: 4096"] if self.damage else [],
            blocks=4096,
            slots=512,
            sessions=1,
            leases=3,
            troubles=[full] if self.troubles else [],
            holders=[
                admin_pb2.Holder(owner="lease 12-ab", blocks=4000),
                admin_pb2.Holder(owner="write-back", blocks=7),
            ],
        )

    def Verify(self, request: Any, context: grpc.ServicerContext) -> Iterator[admin_pb2.VerifyProgress]:
        if self.endless:
            context.add_callback(self.cancelled.set)
        self._note(request, context)
        half = {"checked_blocks": 2000, "total_blocks": 4000, "checked_bytes": 1 << 30}
        yield admin_pb2.VerifyProgress(**half)
        if self.endless:
            self.cancelled.wait(100)
        whole = {"checked_blocks": 4000, "total_blocks": 4000, "checked_bytes": 2 << 30, "done": True}
        if self.damage:
            bad = admin_pb2.DamagedBlock(key=KEY, namespace_id=NAMESPACE, reason="slot 3: checksum")
            yield admin_pb2.VerifyProgress(damaged=[bad], damaged_blocks=1, dropped_blocks=3, **half)
            whole |= {"damaged_blocks": 1, "dropped_blocks": 3}
        yield admin_pb2.VerifyProgress(**whole)

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        if self.endless:
            context.add_callback(self.cancelled.set)
        self._note(request, context)
        yield inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(request_id="r1", prompt_tokens=20))
        for token_id, text in ((104, "Hell"), (111, "o ☃")):
            text = "" if self.silent or request.WhichOneof("prompt") == "token_ids" else text
            for index in reversed(range(request.n)):
                tokens = inference_pb2.Tokens(token_ids=[token_id], text=text, index=index)
                if request.sampling.HasField("logprobs"):
                    tokens.logprobs.add(logprob=-0.5, top_ids=[104, 7], top_logprobs=[-0.5, -2.0])
                yield inference_pb2.GenerateResponse(tokens=tokens)
        computed = max(request.n, request.best_of)
        for index in range(request.n if computed > 1 else 0):
            ended = inference_pb2.SequenceFinished(
                index=index, reason=inference_pb2.FINISH_REASON_STOP, output_tokens=2, cumulative_logprob=-1.25
            )
            yield inference_pb2.GenerateResponse(sequence_finished=ended)
        if self.endless:
            self.cancelled.wait(100)
        yield inference_pb2.GenerateResponse(
            finished=inference_pb2.Finished(
                reason=inference_pb2.FINISH_REASON_LENGTH,
                prompt_tokens=20,
                output_tokens=2 * computed,
                hit_tokens=inference_pb2.HitTokens(disk=16),
                ttft_s=0.25,
                cumulative_logprob=-1.5 if request.HasField("beam_search") else None,
            )
        )


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """A fake daemon on a socket of its own (in a short path: a socket's is limited)."""
    with tempfile.TemporaryDirectory(prefix="pfx-") as directory, ThreadPoolExecutor(4) as threads:
        address = f"unix:{Path(directory) / 's'}"
        fake = FakeDaemon(address)
        server = grpc.server(threads)
        admin_pb2_grpc.add_AdminServicer_to_server(fake, server)
        inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
        server.add_insecure_port(address)
        server.start()
        yield fake
        server.stop(grace=None).wait()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs `prefixd` with these arguments in an empty directory, with no configuration but the defaults."""
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, _flat(arguments), input=stdin, catch_exceptions=False)

    return run


def _flat(arguments: Sequence[str]) -> list[str]:
    return [str(argument) for argument in arguments]
