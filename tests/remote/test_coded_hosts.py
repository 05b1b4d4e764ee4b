"""Daemons that share blocks in fewer bytes over real servers, with settings and a namespace as users have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.block_bytes import Bytes
from benchmarks.load.world import NAMESPACES, Prompt, content, right_bytes, store_prompt
from prefixd.client import NamespaceSpec
from tests.remote.hosts import Host, host
from tests.remote.s3_server import s3_server
from tests.remote.valkey_server import valkey_server

CODED = next(spec for spec in NAMESPACES if spec.codec == "lossless")
UNSAID = NamespaceSpec("tier's", CODED.block_tokens, CODED.parts)
"""As the coded one, but for its codec: the tier's counts."""


@contextmanager
def store(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """The URL of a store, and the settings that it needs."""
    if kind == "valkey":
        with valkey_server(folder) as valkey:
            yield f"valkey://127.0.0.1:{valkey.port}", {}
    else:
        with s3_server(folder) as s3:
            endpoint = f"http://127.0.0.1:{s3.port}"
            yield f"s3://{s3.new_bucket()}/blocks", {"remote__endpoint": endpoint, "remote__insecure_http": True}


def load(reader: Host, prompt: Prompt, spec: NamespaceSpec) -> tuple[int, Bytes]:
    got = np.zeros_like(content(prompt))
    return reader.client.register(spec).load(prompt.tokens, got), got


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_a_cold_host_finds_coded_blocks(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with store(kind, tmp_path) as (url, more):
        settings = more | {"remote__timeout_s": 20, "remote__codec": "int8"}
        prompts = [Prompt(at, 0, 1) for at, spec in enumerate(NAMESPACES) if spec.codec]
        with host(tmp_path / "a", url, **settings) as a:
            for prompt in prompts:
                store_prompt(a.client, prompt)
            unsaid = prompts[0]
            a.client.register(UNSAID).store(unsaid.whole, content(unsaid))
            exact = sum(content(prompt).nbytes for prompt in (*prompts, unsaid))
            a.wait_until_shared(sum(prompt.blocks for prompt in (*prompts, unsaid)))
            written = a.client.stats().remote
            assert 0.5 * exact < written.written_bytes < 0.75 * exact
            assert written.written_bytes + written.saved_bytes == exact
        with host(tmp_path / "b", url, **settings) as b:
            for prompt in prompts:
                there, got = load(b, prompt, prompt.spec)
                assert there == prompt.blocks and np.array_equal(got, right_bytes(prompt, got))
                assert np.array_equal(got, content(prompt)) is (prompt.spec.codec == "lossless")
            there, got = load(b, unsaid, UNSAID)
            assert there == unsaid.blocks and not np.array_equal(got, content(unsaid))
        with host(tmp_path / "c", url, **settings | {"remote__codec": "exact"}) as c:
            assert load(c, unsaid, UNSAID)[0] == 0, "it asks for exact bytes, and there are none"
            assert load(c, prompts[0], prompts[0].spec)[0] == prompts[0].blocks, "the namespace's codec counts"
