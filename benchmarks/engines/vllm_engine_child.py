"""The process of EngineProcess: `python -m benchmarks.engines.vllm_engine_child FD PARENT SETUP`.

Steps a vLLM LLMEngine in this process, and between two steps does what lines of JSON on socket FD ask. It ends in
order when the socket is closed, and at once when the thread that started it is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.001
"""As long as vLLM's own loop sleeps after a step that ran no model, so that a connector's threads get on."""


@dataclass(slots=True)
class _Running:
    number: int
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    first_order: int = 0


class EngineLoop:
    """The engine, what runs in it, and the socket on which it takes orders."""

    def __init__(self, channel: socket.socket, setup: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.llm_engine import LLMEngine

        self._channel = channel
        self._input = b""
        self._open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**_parsed(setup["arguments"])))
        self._core = self._engine.engine_core.engine_core
        self._model_ran = False
        self._watch_steps()
        self._loras = {
            name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
            for number, (name, path) in enumerate(setup["loras"].items(), 1)
        }
        self._running: dict[str, _Running] = {}
        self._idle_waiters: list[int] = []
        self._first_tokens = 0

    def run(self) -> None:
        self._say({"number": -1})
        while self._open:
            busy = self._core.scheduler.has_requests()
            if not busy:
                self._release_idle_waiters()
            self._take_orders(block=not busy)
            if self._core.scheduler.has_requests():
                self._step()
        self._engine.engine_core.shutdown()

    def _watch_steps(self) -> None:
        after_step = self._core.post_step

        def post_step(model_executed: bool) -> None:
            self._model_ran = model_executed
            after_step(model_executed=model_executed)

        self._core.post_step = post_step

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.monotonic()
        for output in outputs:
            running = self._running[output.request_id]
            new = output.outputs[0].token_ids
            if new and running.first_s is None:
                running.first_s, running.first_order = now, self._first_tokens
                self._first_tokens += 1
            running.tokens.extend(new)
            if output.finished:
                del self._running[output.request_id]
                self._say({"result": _result(running, output, now)})
        if not self._model_ran and self._core.scheduler.has_requests():
            time.sleep(_PAUSE_S)

    def _take_orders(self, *, block: bool) -> None:
        while self._selector.select(None if block else 0):
            data = self._channel.recv(1 << 20)
            if not data:
                self._open = False
                return
            *lines, self._input = (self._input + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                reply = getattr(self, f"_do_{order['do']}")(order)
                if reply is not None:
                    self._say({"number": order["number"], **reply})
            if lines:
                return

    def _do_submit(self, order: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        for number, row in zip(order["ids"], order["requests"], strict=True):
            prompt: dict[str, Any] = {"prompt_token_ids": row["prompt"]}
            if row["salt"] is not None:
                prompt["cache_salt"] = row["salt"]
            if row["image"] is not None or row["image_uuid"] is not None:
                prompt["multi_modal_data"] = {"image": [_image(row["image"])]}
            if row["image_uuid"] is not None:
                prompt["multi_modal_uuids"] = {"image": [row["image_uuid"]]}
            sampling = SamplingParams(
                max_tokens=row["max_tokens"],
                temperature=0.0,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            self._running[str(number)] = _Running(number, time.monotonic())
            try:
                self._engine.add_request(
                    str(number),
                    prompt,
                    sampling,
                    lora_request=self._loras[row["lora"]] if row["lora"] is not None else None,
                    priority=row["priority"],
                )
            except VLLMValidationError as error:
                del self._running[str(number)]
                return {"error": str(error)}
        return {}

    def _do_idle(self, order: dict[str, Any]) -> None:
        self._idle_waiters.append(order["number"])

    def _do_metrics(self, _order: dict[str, Any]) -> dict[str, Any]:
        samples = {}
        for metric in self._engine.get_metrics():
            if (value := getattr(metric, "value", None)) is not None:
                labels = ",".join(f'{name}="{text}"' for name, text in sorted(metric.labels.items()))
                samples[f"{metric.name}{{{labels}}}"] = value
        return {"samples": samples}

    def _do_reset(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"done": bool(self._engine.reset_prefix_cache(reset_connector=order["connector"]))}

    def _do_load_adapter(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"done": bool(self._engine.add_lora(self._loras[order["adapter"]]))}

    def _release_idle_waiters(self) -> None:
        for number in self._idle_waiters:
            self._say({"number": number})
        self._idle_waiters.clear()

    def _say(self, line: dict[str, Any]) -> None:
        self._channel.sendall(json.dumps(line).encode() + b"\n")


def _image(seed: int | None) -> Any:
    if seed is None:
        return None
    import numpy as np
    from PIL import Image

    from benchmarks.engines.vllm_models import IMAGE_SIDE

    shape = (IMAGE_SIDE, IMAGE_SIDE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def _parsed(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    parsed = dict(arguments)
    if "kv_transfer_config" in parsed:
        parsed["kv_transfer_config"] = KVTransferConfig(**parsed["kv_transfer_config"])
    return parsed


def _result(running: _Running, output: Any, now: float) -> dict[str, Any]:
    stats = output.metrics
    return {
        "id": running.number,
        "token_ids": running.tokens,
        "ttft_s": (running.first_s or now) - running.submitted_s,
        "cached_tokens": output.num_cached_tokens or 0,
        "preemptions": getattr(stats, "num_preemptions", 0),  # not said before 0.30
        "first_token_order": running.first_order,
    }


def main() -> None:
    """Ties this process to its parent and runs the engine."""
    channel, parent, setup = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, for which this engine was started, has ended")
    with socket.socket(fileno=channel) as own:
        EngineLoop(own, setup).run()


if __name__ == "__main__":
    main()
