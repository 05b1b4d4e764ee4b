"""The model that this daemon's worker runs."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from prefixd.cache import NamespaceSpec
from prefixd.server.kv_shape import KvShape
from prefixd.server.tokenization import TextCodec
from prefixd.server.tokenizer_threads import TokenizerThreads
from prefixd.worker.protocol import Hello


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request needs to know of the model."""

    hello: Hello
    """Its numbers."""
    kv: KvShape
    """How its blocks lie in frames."""
    namespace: NamespaceSpec
    """Its namespace, without a salt."""
    codec: TextCodec | None
    """Its tokenizer, if it has one."""
    threads: TokenizerThreads
    """Where texts are tokenized."""
    frames: int
    """Frames of the GPU tier."""

    def salted(self, salt: bytes) -> NamespaceSpec:
        """The model's namespace for a tenant."""
        return replace(self.namespace, salt=salt)
