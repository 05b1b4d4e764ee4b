"""The examples, as a reader runs them."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.remote.processes import free_port
from tests.vllm.served import Expected
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "vllm"
START_S = 540.0

pytestmark = pytest.mark.timeout(1600)  # several engines, one after the other


@pytest.fixture
def on_a_cpu() -> Iterator[dict[str, str]]:
    """The environment of a vLLM without a GPU, with a temporary folder that goes with the test."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": folder,
        }


def test_the_second_engine_of_chat_has_hits(llama: Path, on_a_cpu: dict[str, str]) -> None:
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": "256MiB"}) as daemon:
        hits = chat(llama, daemon.address, on_a_cpu)
    # Within an engine the document is vLLM's own hit after the first question.
    assert hits["first engine"] == 0 < hits["second engine"]


def chat(model: Path, address: str, env: dict[str, str]) -> dict[str, int]:
    """Tokens from prefixd by engine."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "chat.py"), "--model", str(model), "--address", address],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+ engine): (\d+) of \d+ prompt tokens came from prefixd$", done.stdout, re.MULTILINE)
    return {name: int(hits) for name, hits in found}


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with a `prefixd` that runs in this environment, for PATH."""
    command = tmp_path / "bin" / "prefixd"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m prefixd "$@"\n')
    command.chmod(0o755)
    return command.parent


def test_serve_starts_both_and_a_second_server_has_hits(
    llama: Path, commands: Path, tmp_path: Path, on_a_cpu: dict[str, str]
) -> None:
    env = on_a_cpu | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PREFIXD_SOCKET": str(tmp_path / "p.sock"),
        "DATA_DIR": str(tmp_path / "data"),
        "CPU_BYTES": "64MiB",
        "DISK_BYTES": "256MiB",
        "VLLM": f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
    }
    prompt = [7 + 31 * number % 4001 for number in range(700)]
    answers, hits = [], []
    for _ in range(2):  # the second time everything was restarted, and the blocks come from disk
        with Served(llama, env, tmp_path) as served:
            answer = served.ask(
                "/v1/completions",
                {"model": str(llama), "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True},
            )
            answers.append(answer["choices"][0]["token_ids"])
            hits.append(served.hits())
            with Client(env["PREFIXD_SOCKET"]) as client:  # the engine's end gives up what is not saved yet
                wait_until(lambda: sum(each.blocks for each in client.stats().namespaces) >= 21, "not saved")
    assert answers[0] == answers[1] and len(answers[0]) == 6
    assert hits == [0, 672]


def test_prefill_and_decode_by_nixl_beside_prefixd(
    llama: Path, commands: Path, tmp_path: Path, on_a_cpu: dict[str, str], expected: Expected
) -> None:
    """The second server gets every prompt from the first, which has it from prefixd after it was started again."""
    complete = runpy.run_path(str(EXAMPLES / "prefill_then_decode.py"))["complete"]
    prompt = [11 + 29 * number % 4001 for number in range(700)]
    body = {"model": str(llama), "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answers, hits = [], []
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": "256MiB"}) as daemon:
        env = on_a_cpu | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PREFIXD_SOCKET": daemon.address.removeprefix("unix:"),
            "VLLM": f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
            "KV_BUFFER": "cpu",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }

        def server(role: str) -> Served:
            folder = tmp_path / role
            folder.mkdir(exist_ok=True)
            return Served(llama, env | {"ROLE": role, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}, folder)

        with server("decode") as decode:
            for _ in range(2):
                with server("prefill") as prefill:
                    answer = complete(prefill.url, decode.url, body)
                    answers.append(tuple(answer["choices"][0]["token_ids"]))
                    hits.append((prefill.hits(), decode.hits()))
                    with Client(daemon.address) as client:
                        wait_until(lambda: sum(each.blocks for each in client.stats().namespaces) >= 21, "not saved")
                urllib.request.urlopen(f"{decode.url}/reset_prefix_cache", b"", timeout=60).close()
    assert answers[0] == answers[1] == expected([EngineRequest(prompt, 6)])[0]
    assert [at_prefill for at_prefill, _ in hits] == [0, 672]
    assert hits[0][1] >= 672 and hits[1][1] == 2 * hits[0][1]


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ([], {}, "usage: serve.sh MODEL"),
        (["a-model"], {"HOST_POOL_BYTES": "16GiB"}, "HOST_POOL_BYTES=16GiB: write bytes as a number"),
        (["a-model"], {"ROLE": "decoder", "PREFIXD_SOCKET": "s"}, "ROLE=decoder: set prefill or decode"),
    ],
)
def test_serve_refuses_what_it_cannot_use(arguments: list[str], settings: dict[str, str], words: str) -> None:
    done = subprocess.run(
        ["bash", str(EXAMPLES / "serve.sh"), *arguments], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(words) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "connector"),
    [
        ({}, "PrefixdConnector"),
        ({"HOST_POOL_BYTES": "1073741824"}, "OffloadingConnector"),
        ({"ROLE": "prefill"}, "MultiConnector"),
    ],
)
def test_serve_looks_for_the_daemon_where_prefixd_has_it(
    settings: dict[str, str], connector: str, commands: Path, tmp_path: Path
) -> None:
    """So that one that was started by `prefixd serve` alone is used, and no second one started on its data."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        done = subprocess.run(
            ["bash", str(EXAMPLES / "serve.sh"), "a-model"],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if not name.startswith("PREFIXD_")}
            | {
                "PATH": f"{commands}:{os.environ['PATH']}",
                "XDG_RUNTIME_DIR": folder,
                "DATA_DIR": str(tmp_path / "data"),
                "CPU_BYTES": "16MiB",
                "DISK_BYTES": "16MiB",
                "VLLM": "echo",  # in place of a server: says what it was given
                **settings,
            },
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout.partition("--kv-transfer-config ")[2]
        given, _ = json.JSONDecoder().raw_decode(said)
        assert given["kv_connector"] == connector
        assert f'"address": "unix:{folder}/prefixd/prefixd.sock"' in said


class Served:
    """serve.sh on a free port of this host, until the context is left; then both must have ended in order."""

    def __init__(self, model: Path, env: dict[str, str], folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "serve.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("bash", str(EXAMPLES / "serve.sh"), str(model), "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "2048"),
                    *("--block-size", "32"),
                ],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Served:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.end(signal.SIGKILL)
                    pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")
                time.sleep(0.25)

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.end(signal.SIGKILL)

    def end(self, how: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, how)
        except ProcessLookupError:
            return
        self.process.wait()

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def hits(self) -> int:
        (line,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return int(float(line))
