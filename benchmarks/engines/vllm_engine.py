"""A real vLLM engine in a process of its own, driven over a socket: for the tests of the connector and its benchmark.

    with EngineProcess(model_dir, kv_transfer=connector(daemon.address)) as engine:
        results = engine.generate([EngineRequest(prompt=tokens, max_tokens=8)])

The engine runs on the CPU, greedy, with one thread and float32 unless told otherwise, so that the same prompt gives
the same tokens whether its prefix was computed or loaded. This module needs no vLLM; the process that it starts does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, Self

from prefixd.base.errors import PrefixdError
from prefixd.cli.demo.daemon_process import last_lines

_LAST_LINES = 25
_CHILD = "benchmarks.engines.vllm_engine_child"
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


class EngineFailed(PrefixdError):
    """The engine did not start, died or did not answer in time; the message has the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request: greedy, exactly `max_tokens` tokens. `lora` is a name given to the engine's `loras`.

    `image` is the seed of an image that goes with it, `image_uuid` what the client calls that; alone, it stands for an
    image that the engine has had.
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    salt: str | None = None
    lora: str | None = None
    priority: int = 0
    image: int | None = None
    image_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What became of one request. Times are in seconds, measured in the engine's process."""

    id: int
    token_ids: tuple[int, ...]
    ttft_s: float
    """From handing the request to the engine to its first token."""
    cached_tokens: int
    """vLLM's own: prompt tokens that it did not compute, from its own cache or the connector's."""
    preemptions: int
    first_token_order: int
    """How many other requests of this engine had their first token earlier."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """vLLM's own counters since the engine started; all count tokens but `preemptions`."""

    prefix_hits: int
    external_queries: int
    external_hits: int
    preemptions: int
    prompt_tokens: int
    prompt_tokens_by_source: Mapping[str, int]
    """local_compute is what was computed; local_cache_hit and external_kv_transfer were not."""
    cached_by_source: Mapping[str, int]
    """Tokens that were not computed, by where they were: device, host, disk, external_unspecified."""
    samples: Mapping[str, float] = field(repr=False)
    """Every counter and gauge, the connector's among them, as name{label="value"}."""


class _Process(Protocol):
    """The part of Popen that EngineProcess uses."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def connector(address: str, **options: object) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for prefixd's connector, with `options` as its `kv_connector_extra_config`."""
    return {
        "kv_connector": "PrefixdConnector",
        "kv_connector_module_path": "prefixd.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **options},
    }


class EngineProcess:
    """A vLLM engine in its own process, which ends when the thread that started it does, however that happens.

    `arguments` are vLLM's EngineArgs beside the defaults (float32, eager, block size 32, 64 MiB of KV cache, executor
    "uni"). `kv_transfer` is a `kv_transfer_config` or None for vLLM alone; `scheduler_cls` an import path. `loras`
    are adapters by name. `env` goes on top of this process's environment. Several threads may use it at once.
    """

    def __init__(
        self,
        model: Path,
        *,
        kv_transfer: Mapping[str, Any] | None = None,
        scheduler_cls: str | None = None,
        loras: Mapping[str, Path] | None = None,
        env: Mapping[str, str] | None = None,
        threads: int = 1,
        log: Path | None = None,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 60.0,
        **arguments: Any,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
            **arguments,
        }
        if kv_transfer is not None:
            self._arguments["kv_transfer_config"] = dict(kv_transfer)
        if scheduler_cls is not None:
            self._arguments["scheduler_cls"] = scheduler_cls
        self._loras = {name: str(path) for name, path in (loras or {}).items()}
        if self._loras:
            self._arguments |= {"enable_lora": True, "max_loras": len(self._loras)}
        if self._arguments.get("tensor_parallel_size", 1) > 1:
            self._arguments["distributed_executor_backend"] = "mp"
        self._env = {
            **_QUIET,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            **(env or {}),
        }
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._temporary = None if log else tempfile.TemporaryDirectory(prefix="prefixd-engine-")
        self.log = log or Path(self._temporary.name if self._temporary else "") / "engine.log"
        self._process: _Process | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        """For its temporary files: vLLM leaves sockets behind, whose paths must be short, and what its ranks met in."""
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._results: dict[int, EngineResult] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._next_id = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def pid(self) -> int:
        """The engine's process; raises EngineFailed when none runs."""
        if self._process is None:
            raise EngineFailed("the engine is not running; start it first")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; False too when it ended by itself."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the engine takes requests; raises EngineFailed."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Starts the process and does not wait until it takes requests."""
        if self._process is not None:
            raise EngineFailed(f"the engine runs already, as process {self._process.pid}; stop it first")
        ours, theirs = socket.socketpair()
        setup = {"arguments": self._arguments, "loras": self._loras}
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-")
        with theirs, self.log.open("ab") as log:
            self._process = self._spawn(theirs, log, setup, os.environ | {"TMPDIR": self._scratch.name} | self._env)
        self._socket, self._closed = ours, False
        self._results, self._replies = {}, {}
        threading.Thread(target=self._read, args=(ours,), name="engine-reader", daemon=True).start()

    def _spawn(
        self, channel: socket.socket, log: IO[bytes], setup: Mapping[str, Any], env: Mapping[str, str]
    ) -> _Process:
        return subprocess.Popen(
            [sys.executable, "-m", _CHILD, str(channel.fileno()), str(os.getpid()), json.dumps(setup)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[channel.fileno()],
            start_new_session=True,  # its tensor-parallel ranks are in its group
            env=env,
        )

    def wait_until_ready(self) -> None:
        """Returns when the engine that was launched takes requests; raises EngineFailed, and ends it."""
        try:
            self._reply(-1, self._start_timeout_s)
        except BaseException:
            self.kill()
            raise

    def submit(self, requests: Sequence[EngineRequest]) -> list[int]:
        """Hands over `requests` in this order and does not wait for them; their ids, for `collect`."""
        with self._changed:
            first = self._next_id
            self._next_id += len(requests)
        ids = list(range(first, first + len(requests)))
        rows = [{**asdict(request), "prompt": list(request.prompt)} for request in requests]
        self._command("submit", ids=ids, requests=rows)
        return ids

    def collect(self, ids: Sequence[int], timeout_s: float = 300.0) -> list[EngineResult]:
        """The results of `ids` in this order, once all are there; raises EngineFailed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := [number for number in ids if number not in self._results]:
                self._wait(deadline, f"{len(missing)} of {len(ids)} requests did not finish within {timeout_s:g} s")
            return [self._results.pop(number) for number in ids]

    def generate(self, requests: Sequence[EngineRequest], timeout_s: float = 300.0) -> list[EngineResult]:
        """`submit`, then `collect`."""
        return self.collect(self.submit(requests), timeout_s)

    def finished(self, ids: Sequence[int]) -> bool:
        """Whether all of `ids` have a result that `collect` would give at once."""
        with self._changed:
            return all(number in self._results for number in ids)

    def wait_until_idle(self, timeout_s: float = 120.0) -> None:
        """Returns when vLLM has nothing left to do, a connector's saves among it."""
        self._command("idle", timeout_s)

    def metrics(self) -> EngineMetrics:
        """vLLM's own counters, up to its last step."""
        samples: dict[str, float] = self._command("metrics")["samples"]

        def total(name: str) -> int:
            return int(sum(value for key, value in samples.items() if key.partition("{")[0] == f"vllm:{name}"))

        def by_source(name: str) -> dict[str, int]:
            found = {}
            for key, value in samples.items():
                bare, _, labels = key.partition("{")
                if bare == f"vllm:{name}":
                    found[labels.partition('source="')[2].partition('"')[0]] = int(value)
            return found

        return EngineMetrics(
            total("prefix_cache_hits"),
            total("external_prefix_cache_queries"),
            total("external_prefix_cache_hits"),
            total("num_preemptions"),
            total("prompt_tokens"),
            by_source("prompt_tokens_by_source"),
            by_source("prompt_tokens_cached_by_source"),
            samples,
        )

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """vLLM's own: forgets its prefix cache, and with `connector` asks the connector to do the same. Whether it
        did; False while requests hold blocks."""
        return bool(self._command("reset", connector=connector)["done"])

    def load_adapter(self, name: str) -> bool:
        """Has vLLM load one of `loras` before a request wants it. Whether it did."""
        return bool(self._command("load_adapter", adapter=name)["done"])

    def stop(self) -> int | None:
        """Shuts the engine down in order; its exit status, or None when it did not run. Raises EngineFailed, after
        SIGKILL, when that takes longer than `stop_timeout_s`."""
        if self._process is None:
            return None
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        try:
            status = self._process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired as error:
            words = self.last_words()
            self.kill()
            raise EngineFailed(
                f"the engine did not end within {self._stop_timeout_s:g} s of being asked{words}"
            ) from error
        self._reap()
        return status

    def kill(self) -> int | None:
        """SIGKILL to the engine and its ranks, as in a crash; its exit status, or None when it did not run."""
        if self._process is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._reap()
        return status

    def last_words(self) -> str:
        """The end of its log, to be put behind an error's message."""
        said = last_lines(self.log, _LAST_LINES)
        return "; it said:\n  " + "\n  ".join(said) if said else ""

    def _command(self, name: str, timeout_s: float = 120.0, **fields: Any) -> dict[str, Any]:
        with self._changed:
            number = self._next_id
            self._next_id += 1
            if self._socket is None:
                raise EngineFailed("the engine is not running; start it first")
            try:
                self._socket.sendall(json.dumps({"do": name, "number": number, **fields}).encode() + b"\n")
            except OSError as error:
                raise EngineFailed(f"the engine is gone{self.last_words()}") from error
        return self._reply(number, timeout_s)

    def _reply(self, number: int, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while number not in self._replies:
                self._wait(deadline, f"the engine did not answer within {timeout_s:g} s")
            reply = self._replies.pop(number)
        if "error" in reply:
            raise EngineFailed(f"the engine refused: {reply['error']}")
        return reply

    def _wait(self, deadline: float, late: str) -> None:
        """Waits for news; raises EngineFailed when there can be none, or too late. The lock is held."""
        if self._closed:
            status = self._process.wait(self._stop_timeout_s) if self._process is not None else None
            raise EngineFailed(f"the engine ended with status {status}{self.last_words()}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise EngineFailed(late + self.last_words())
        self._changed.wait(left)

    def _read(self, source: socket.socket) -> None:
        with source.makefile("rb") as lines:
            try:
                for line in lines:
                    said = json.loads(line)
                    with self._changed:
                        if source is not self._socket:
                            return
                        if "result" in said:
                            row = said["result"]
                            self._results[row["id"]] = EngineResult(**{**row, "token_ids": tuple(row["token_ids"])})
                        else:
                            self._replies[said["number"]] = said
                        self._changed.notify_all()
            except OSError:
                pass  # the socket was closed here, or the process was killed while it wrote
        with self._changed:
            if source is self._socket:
                self._closed = True
                self._changed.notify_all()

    def _reap(self) -> None:
        with self._changed:
            if self._socket is not None:
                self._socket.close()
            self._socket, self._process, self._closed = None, None, True
            self._changed.notify_all()
        if self._scratch is not None:
            self._scratch.cleanup()
