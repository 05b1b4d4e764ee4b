"""Two tenants generate on one daemon: neither keeps the other from working, ends its requests, or meets its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from tests.daemons import Remote
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
TOML = """
[server]
tcp = "127.0.0.1:0"
insecure_tcp = true
tokens = "{tokens}"
[worker]
max_running = 2
[scheduler]
queue_limit = 36
[tenants.alice]
[tenants.bob]
requests_per_s = 0.01
"""


@pytest.fixture(scope="module")
def operator(with_model: dict[str, str | int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    folder = tmp_path_factory.mktemp("tenants")
    tokens, config = folder / "tokens", folder / "prefixd.toml"
    tokens.write_text(f"a client {ALICE} alice\nb client {BOB} bob\n")
    tokens.chmod(0o600)
    config.write_text(TOML.format(tokens=tokens))
    with DaemonProcess({**with_model, "gpu.bytes": "4MiB"}, config=config) as daemon, Remote(daemon) as remote:
        remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_READY)
        yield remote
        remote.settled()


class Caller:
    """Generates and cancels with a token."""

    def __init__(self, operator: Remote, token: str, options: Sequence[tuple[str, int]] = ()) -> None:
        self._channel = grpc.insecure_channel(
            operator.daemon.tcp or "", options=[("grpc.use_local_subchannel_pool", 1), *options]
        )
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = [("authorization", f"Bearer {token}")]

    def begin(self, ids: bytes, max_tokens: int, **fields: Any) -> Any:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=ids),
            sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )
        stream = self._stub.Generate(request, metadata=self._metadata, timeout=2 * WAIT_S)
        return stream

    def cancel(self, request_id: str) -> bool:
        answer = self._stub.Cancel(
            inference_pb2.CancelRequest(request_id=request_id), metadata=self._metadata, timeout=WAIT_S
        )
        return bool(answer.cancelled)

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def callers(operator: Remote) -> Iterator[tuple[Caller, Caller]]:
    alice, bob = Caller(operator, ALICE), Caller(operator, BOB)
    yield alice, bob
    for caller in (alice, bob):
        caller.close()
    operator.settled()  # who comes next has a connection of its own, and may be heard before the end of these


def figures(operator: Remote, name: str) -> admin_pb2.TenantStats:
    tenants = operator.admin.ListTenants(admin_pb2.ListTenantsRequest(), timeout=WAIT_S).tenants
    return next(tenant for tenant in tenants if tenant.name == name)


def test_a_flood_of_one_leaves_the_other_its_place_and_its_turn(
    operator: Remote, callers: tuple[Caller, Caller], token_bytes_of: Callable[[int], bytes]
) -> None:
    alice, bob = callers
    first = alice.begin(token_bytes_of(0), 900, request_id="job", priority=-9)
    assert next(first).accepted.request_id == "job"
    flood, refusals = [first], []
    while not refusals:
        stream = alice.begin(token_bytes_of(len(flood)), 900, priority=-9)
        try:
            next(stream)
            flood.append(stream)
        except grpc.RpcError as error:
            refusals.append(error)
    assert "tenant alice" in str(refusals[0]) and "places 6 are kept for each tenant" in str(refusals[0])
    assert "24 requests of the tenant wait" in str(refusals[0])
    had = figures(operator, "alice")
    assert 0 < had.waiting_requests <= 24 and 0 < had.running_requests <= 2
    assert had.refused["scheduler.queue_limit"] == 1
    late = bob.begin(token_bytes_of(100), 2, request_id="job")
    assert next(late).accepted.request_id == "job", "the queue has a place, and the id is bob's own"
    for stream in flood[:2]:
        stream.cancel()
    assert [event.WhichOneof("event") for event in late][-1] == "finished", "before all of the flood"
    assert figures(operator, "alice").waiting_requests
    with pytest.raises(grpc.RpcError, match=r"tenant bob: more than 0.01 requests a second .* send it again in"):
        next(bob.begin(token_bytes_of(101), 2))
    for stream in flood:
        stream.cancel()


def test_a_tenant_cancels_its_own_and_an_operator_everybodys(
    operator: Remote, callers: tuple[Caller, Caller], token_bytes_of: Callable[[int], bytes]
) -> None:
    alice, bob = callers
    streams = [
        alice.begin(token_bytes_of(7), 1500, request_id="same"),
        operator.begin([1, 2], request_id="same", max_tokens=1500),
    ]
    for stream in streams:
        assert next(stream).accepted.request_id == "same"
    assert not bob.cancel("same")
    assert alice.cancel("same")
    assert list(streams[0])[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED
    assert not alice.cancel("same"), "the operator's is left"
    assert operator.inference.Cancel(inference_pb2.CancelRequest(request_id="same"), timeout=WAIT_S).cancelled
    assert list(streams[1])[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED


def test_a_read_only_request_over_the_wire_leaves_nothing(
    operator: Remote, callers: tuple[Caller, Caller], token_bytes_of: Callable[[int], bytes]
) -> None:
    alice, _ = callers
    for read_only, found in ((True, 0), (False, 0), (True, 64)):
        *_, last = alice.begin(token_bytes_of(200), 2, read_only=read_only)
        assert last.finished.hit_tokens.gpu == found


@pytest.fixture
def token_bytes_of(prompt: Callable[..., list[int]]) -> Callable[[int], bytes]:
    """Different prompts of 70 tokens."""
    return lambda number: b"".join(token.to_bytes(4, "little") for token in prompt(70, number))


def test_answers_of_one_that_are_not_read_leave_the_other_its_calls(
    operator: Remote, callers: tuple[Caller, Caller], token_bytes_of: Callable[[int], bytes]
) -> None:
    alice, bob = callers
    operator.admin.SetTenant(admin_pb2.SetTenantRequest(name="bob", unlimited=["requests_per_s"]), timeout=WAIT_S)
    idle = Caller(operator, ALICE, [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)])
    calls: list[Any] = []
    while not (ended := [call for call in calls if call.done()]):
        calls.append(idle.begin(token_bytes_of(0), 1))
        operator.until(lambda stats: not (stats.scheduler.waiting_requests or stats.worker.running_requests))
    assert "calls of Generate are under way" in ended[0].details() and "have 104 together" in ended[0].details()
    assert figures(operator, "alice").refused["generations"] >= 1
    with pytest.raises(grpc.RpcError, match="tenant alice: 70 calls of Generate"):
        next(alice.begin(token_bytes_of(0), 1))
    assert [event.WhichOneof("event") for event in bob.begin(token_bytes_of(1), 1)][-1] == "finished"
    idle.close()

    def answered(_: object) -> bool:
        try:
            return [event.WhichOneof("event") for event in alice.begin(token_bytes_of(0), 1)][-1] == "finished"
        except grpc.RpcError as error:
            assert "calls of Generate are under way" in str(error)
            return False

    operator.until(answered)
