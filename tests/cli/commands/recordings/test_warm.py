"""`prefixd warm`: what is written, what is asked of the daemon, and what is told about it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.errors import ConfigError
from prefixd.v1 import admin_pb2, inference_pb2
from prefixd.workloads import warm_file
from prefixd.workloads.warm_file import WarmFile, WarmNamespace, read_warm_file

Cli = Callable[..., Any]
NAMESPACE = WarmNamespace(bytes(range(8)), "default", "", {"name": "tiny-llama", "blockTokens": 16})


@pytest.fixture(autouse=True)
def address(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", daemon.address)


def asked(daemon: Any, kind: type[Any]) -> list[Any]:
    return [request for request in daemon.requests if isinstance(request, kind)]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_token_ids_are_written_only_if_the_operator_asks(cli: Cli, daemon: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    out = cli("warm", "record", str(file), "--limit", "5", "--by", "hits").stdout
    assert "1 prefixes in" in out and "by their keys alone (see --tokens)" in out
    assert file.stat().st_mode & 0o777 == 0o600
    namespace, prefix = lines(file)
    assert namespace["namespace"]["name"] == "tiny-llama" and "salt" not in namespace["namespace"]
    assert prefix == {"namespace_id": namespace["namespace_id"], "key": prefix["key"], "blocks": 32}
    assert not asked(daemon, admin_pb2.InspectRequest)
    refused = cli("warm", "record", str(file), "--tokens")
    assert refused.exit_code == 2 and "exists already" in refused.stderr
    assert json.loads(cli("warm", "record", str(file), "--tokens", "--force", "--json").stdout)["prefixes"] == 1
    assert lines(file)[1]["token_ids"] == [1000, 1001, 1002]


def test_each_prefix_is_asked_for_and_the_sum_is_told(cli: Cli, daemon: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    with WarmFile(file) as written:
        written.add(NAMESPACE, "9f86d081", 4, None)
        written.add(NAMESPACE, "9f86d082", 4, list(range(64)))
    out = cli("warm", "load", str(file)).stdout
    by_key, by_tokens = asked(daemon, admin_pb2.WarmRequest)
    assert by_key.key == f"{bytes(range(8)).hex()}/9f86d081"
    assert by_tokens.namespace_id == bytes(range(8)) and by_tokens.tenant == "default"
    assert by_tokens.namespace.name == "tiny-llama" and len(by_tokens.token_ids) == 256
    assert "2 prefixes, 128 tokens" in out and "found     32 in cpu, 64 in remote" in out
    assert "brought   32 to CPU memory" in out and "left      32" in out and "missing   32" in out
    figures = json.loads(cli("warm", "load", str(file), "--json").stdout)
    assert figures["found_tokens"] == {"cpu": 32, "remote": 64} and figures["failed"] == []


def test_prompts_are_computed_by_the_model_after_all_others(cli: Cli, daemon: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text('{"prompt": "You are helpful."}\n\n{"token_ids": [1, 2], "model": "tiny"}\n')
    result = cli("warm", "load", str(file))
    text, ids = asked(daemon, inference_pb2.GenerateRequest)
    assert text.text == "You are helpful." and ids.token_ids.ids == struct.pack("<2I", 1, 2) and ids.model == "tiny"
    assert all(each.priority == (1 << 31) - 1 and each.sampling.max_tokens == 1 for each in (text, ids))
    assert "computed" in result.stdout and result.exit_code == 0
    daemon.requests.clear()
    result = cli("warm", "load", str(file), "--no-compute")
    assert result.exit_code == 1 and "line 3: a prompt for a model is computed" in result.stderr
    assert not asked(daemon, inference_pb2.GenerateRequest)


def test_what_fails_is_told_with_its_line_and_the_others_come(cli: Cli, daemon: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    with WarmFile(file) as written:
        for key in ("dead", "9f86d081"):
            written.add(NAMESPACE, key, 4, None)
    result = cli("warm", "load", str(file))
    assert result.exit_code == 1 and "line 2: no prefix has the key dead here" in result.stderr
    assert "record with `prefixd warm record --tokens`" in result.stderr
    assert len(asked(daemon, admin_pb2.WarmRequest)) == 2 and "2 prefixes, 64 tokens" in result.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: it is no JSON"),
        ("[]", "line 1: it is no JSON object"),
        ('\n{"namespace_id": "00", "key": "1"}', "line 2: namespace_id '00' has no line with its namespace"),
        ('{"namespace_id": "x", "namespace": {}}', "namespace_id 'x' is not hex"),
        ('{"namespace_id": "00", "namespace": 1}', "namespace must be an object"),
        ('{"namespace_id": "00", "namespace": {}}\n{"namespace_id": "00"}', "line 2: a prefix of a namespace needs"),
        ('{"token_ids": [-1]}', "token_ids must be a list of numbers"),
        ('{"token_ids": []}', "token_ids must be a list of numbers"),
        ('{"prompt": ""}', "prompt must be a text"),
        ('{"prompt": "a", "token_ids": [1]}', "for a model, prompt or token_ids"),
        ('{"key": "9f86"}', "for a model, prompt or token_ids"),
        ('{"prompt": "a", "model": 1}', "model must be a text"),
    ],
)
def test_a_wrong_line_is_told_before_anything_is_done(
    cli: Cli, daemon: Any, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(text)
    result = cli("warm", "load", str(file))
    assert result.exit_code == 2 and said in result.stderr and not daemon.requests


def test_a_file_is_bounded_and_left_alone_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.jsonl"
    monkeypatch.setattr(warm_file, "MOST_PREFIXES", 2)
    with pytest.raises(RuntimeError), WarmFile(file) as written:
        assert written.add(NAMESPACE, "1", 1, [1]) and written.add(NAMESPACE, "2", 1, [2])
        assert not written.add(NAMESPACE, "3", 1, [3])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    file.write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(ConfigError, match="more than 2 prefixes"):
        list(read_warm_file(file))
    monkeypatch.setattr(warm_file, "_LINE_BYTES", 10)
    with pytest.raises(ConfigError, match="line 1: it has more than 10 bytes"):
        list(read_warm_file(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_warm_file(tmp_path / "none"))
