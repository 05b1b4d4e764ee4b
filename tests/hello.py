"""What a worker says first: a model of one group of layers."""

from __future__ import annotations

from typing import Any

import msgspec

from prefixd.worker_protocol.protocol import GroupShape, Hello

HELLO = Hello(
    groups=(GroupShape("attention", None, 1, 1),),
    frame_bytes=4096,
    dtype="float32",
    block_tokens=16,
    layout="token",
    chunk_bytes=4096,
    vocab_size=96,
    max_model_tokens=256,
    eos_token_ids=(2,),
    architecture="Tiny",
    parameters=1000,
    device="cpu",
)


def hello(**fields: Any) -> Hello:
    """`HELLO` with other fields."""
    return msgspec.structs.replace(HELLO, **fields)
