"""Two hosts, each with a vLLM and a daemon, share a Valkey: what one has computed the other loads."""

from __future__ import annotations

from pathlib import Path

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.remote.valkey_server import valkey_server
from tests.vllm.served import BLOCK_TOKENS, DAEMON, Expected, NewRequests, StartEngine, cacheable, run
from tests.waiting import wait_until


def test_an_engine_of_another_host_hits_what_the_first_has_computed(
    llama: Path, make_engine: StartEngine, expected: Expected, new_requests: NewRequests, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    requests, more = new_requests(700, 389, 129), new_requests(400)
    with valkey_server(tmp_path / "valkey") as valkey:
        shared = {"remote.url": f"valkey://127.0.0.1:{valkey.port}", "remote.secret_file": secret}
        with DaemonProcess({**DAEMON, **shared}) as a, make_engine(llama, a) as engine, Client(a.address) as client:
            tokens, hits = run(engine, requests)
            assert (tokens, hits) == (expected(requests), 0)
            blocks = sum(len(request.prompt) // BLOCK_TOKENS for request in requests)
            wait_until(lambda: client.stats().remote.shared_blocks >= blocks, "the blocks are not shared")
        with (
            DaemonProcess({**DAEMON, **shared, "remote.lookup_s": 10, "remote.timeout_s": 10}) as b,
            make_engine(llama, b) as engine,
            Client(b.address) as client,
        ):
            tokens, hits = run(engine, requests)
            assert (tokens, hits) == (expected(requests), cacheable(requests))
            assert client.stats().remote.read_bytes > 0
            valkey.process.freeze()
            assert run(engine, more) == (expected(more), 0)
            wait_until(lambda: client.stats().troubles, "the trouble is not told")
            valkey.process.end()
            again, hits = run(engine, requests)
            assert (again, hits) == (tokens, cacheable(requests)), "what was loaded is in the host's own tiers"
            assert not client.check_integrity().violations
