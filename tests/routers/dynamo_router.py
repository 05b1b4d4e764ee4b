"""Dynamo's router over one worker, which is told of the worker's blocks by a ZMQ endpoint; run in the routers'
environment. Reads a prompt a line, a JSON list of token ids; writes the worker's overlap as a JSON object a line."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime


async def nothing(request: Any) -> AsyncIterator[Any]:
    yield {}


async def main(events: str, block_tokens: int) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("prefixd.worker.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(nothing))
    config = ModelRuntimeConfig()
    config.total_kv_blocks, config.enable_local_indexer = 4096, True
    with tempfile.TemporaryDirectory() as empty:
        await register_model(
            ModelInput.Tokens,
            ModelType.Completions,
            endpoint,
            empty,
            "m",
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=block_tokens,
            runtime_config=config,
            skip_model_assets=True,
        )
    publisher = KvEventPublisher(endpoint, kv_block_size=block_tokens, zmq_endpoint=events, enable_local_indexer=True)
    router = KvRouter(endpoint, block_tokens, KvRouterConfig())
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await router.get_overlap_scores(json.loads(line))), flush=True)
    serving.cancel()
    del publisher


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
