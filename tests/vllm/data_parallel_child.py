"""The process of `Replicas`: an AsyncLLM, which starts a process for each replica.

Takes orders as `benchmarks.engines.vllm_engine_child` does, as lines of JSON on a socket, and ends when it is closed.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LINE_BYTES = 1 << 24


def run(channel: socket.socket, setup: dict[str, Any]) -> None:
    """Until the socket is closed."""
    asyncio.run(_serve(channel.dup(), setup["arguments"]))


async def _serve(channel: socket.socket, arguments: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    reader, writer = await asyncio.open_connection(sock=channel, limit=_LINE_BYTES)
    transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, kv_transfer_config=transfer))
    try:
        writer.write(b'{"number": -1}\n')
        while line := await reader.readline():
            order = json.loads(line)
            reply = await _ORDERS[order["do"]](engine, order)
            writer.write(json.dumps({"number": order["number"], **reply}).encode() + b"\n")
    finally:
        engine.shutdown()


async def _generate(engine: AsyncLLM, order: dict[str, Any]) -> dict[str, Any]:
    """All requests at once, by the replica `rank`: for each its tokens, and how many of its prompt were cached."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def one(place: int, row: dict[str, Any]) -> tuple[list[int], int]:
        sampling = SamplingParams(
            max_tokens=row["max_tokens"],
            temperature=0.0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = engine.generate(
            {"prompt_token_ids": row["prompt"]},
            sampling,
            f"{order['number']}-{place}",
            data_parallel_rank=order["rank"],
        )
        (output,) = [output async for output in outputs]
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    return {"results": await asyncio.gather(*(one(place, row) for place, row in enumerate(order["requests"])))}


async def _count(engine: AsyncLLM, order: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `counter`, by the number of the replica."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    return {
        "counts": {
            metric.labels["engine"]: metric.value
            for metric in get_metrics_snapshot()
            if isinstance(metric, Counter) and metric.name == order["counter"]
        }
    }


_ORDERS = {"generate": _generate, "count": _count}
