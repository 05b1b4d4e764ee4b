"""A whole SGLang engine on a CPU, from the unmodified wheel: its scheduler's process, model, radix cache and HiCache.

Its CPU kernels (`sgl_kernel`) are not needed: without AMX SGLang computes with torch. What is replaced is what only a
GPU has: pinned host memory, and the kernels that copy between the GPU's pool and the host pool.

    python -m tests.sglang.engine.engine_process FD       serves an `EngineProcess` over the connection FD
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.engines.sglang_without_gpu import sglang, stand_in

# When this module is imported: SGLang's processes import it, with what they are to run, before anything of SGLang's.
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sglang("srt.environ")
stand_in("triton").runtime.driver.active = None  # it has no device


class EngineProcess:
    """An engine in a process of its own: SGLang ends all children of the process that an engine is in.

    Args:
        arguments: SGLang's `ServerArgs`.
    """

    def __init__(self, **arguments: Any) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", __spec__.name, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._ask("start", **arguments)

    def generate(self, tokens: list[int], adapter: str | None = None, new_tokens: int = 8) -> tuple[list[int], int]:
        """What follows a prompt, greedily, and how many of its tokens came from storage."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0}
        answer = self._ask("generate", input_ids=tokens, sampling_params=sampling, lora_path=adapter)
        cached = answer["meta_info"]["cached_tokens_details"] or {}
        return answer["output_ids"], int(cached.get("storage", 0))

    def flush(self) -> bool:
        """Empties the caches in the GPU's pool and in the host pool."""
        return bool(self._ask("flush"))

    def clear_storage(self) -> bool:
        return bool(self._ask("clear_storage"))

    def metrics(self) -> str:
        return str(self._ask("metrics"))

    def stop(self) -> None:
        self._connection.close()
        self._process.wait(30)

    def kill(self) -> None:
        """Ends its process as the kernel would. The others follow it."""
        self._process.kill()
        self._process.wait(30)
        self._connection.close()

    def _ask(self, call: str, **arguments: Any) -> Any:
        self._connection.send((call, arguments))
        return self._connection.recv()


def start(**arguments: Any) -> Any:
    """An `Engine`; its `shutdown` ends its processes.

    Args:
        arguments: SGLang's `ServerArgs`.
    """

    class OnCpu(sglang("srt.entrypoints.engine").Engine):  # type: ignore[misc]
        run_scheduler_process_func: Callable[..., Any] = staticmethod(_run_scheduler)
        run_detokenizer_process_func: Callable[..., Any] = staticmethod(_run_detokenizer)

    on_cpu = dict(
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
    )
    return OnCpu(**on_cpu | arguments)


def _run_scheduler(*args: Any, **kwargs: Any) -> Any:
    _copy_with_torch()
    return sglang("srt.managers.scheduler").run_scheduler_process(*args, **kwargs)


def _run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    return sglang("srt.managers.detokenizer_manager").run_detokenizer_process(*args, **kwargs)


def _copy_with_torch() -> None:
    common, mha = sglang("srt.mem_cache.pool_host.common"), sglang("srt.mem_cache.pool_host.mha")
    common._cuda_host_register = lambda *args, **kwargs: None
    for module in (common, mha):
        module._cuda_host_unregister = lambda *args, **kwargs: None
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_layer
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _backup
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # noqa: B010  mypy takes no assignment to a method


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def _load_layer(
    pool: Any, _: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, layer: int, *args: Any, **kwargs: Any
) -> None:
    for host, device in ((pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)):
        device[layer][device_indices.long()] = _layer(pool, host, layer)[host_indices.long()]


def _backup(pool: Any, _: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, *args: Any) -> None:
    for host, device in ((pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)):
        for layer in range(pool.layer_num):
            _layer(pool, host, layer)[host_indices.long()] = device[layer][device_indices.long()]


def _layer(pool: Any, buffer: torch.Tensor, layer: int) -> torch.Tensor:
    """A layer of a host pool's keys or values: one row a token."""
    return buffer[layer] if pool.layout == "layer_first" else buffer[:, layer]


def _metrics() -> str:
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def _serve(connection: Connection) -> None:
    call, arguments = connection.recv()
    assert call == "start", call
    engine = start(**arguments)
    manager = engine.tokenizer_manager
    calls: dict[str, Callable[..., Any]] = {
        "generate": engine.generate,
        "flush": lambda: engine.flush_cache().success,
        "clear_storage": lambda: engine.loop.run_until_complete(manager.clear_hicache_storage()).success,
        "metrics": _metrics,
    }
    try:
        connection.send(None)
        while True:
            call, arguments = connection.recv()
            connection.send(calls[call](**arguments))
    except EOFError:  # stopped
        engine.shutdown()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
