"""Caches that are left out of a run because they fail, so that the others are measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.engines.vllm_engine import EngineProcess
from benchmarks.peers_parts.caches import ALONE, LABELS, Config
from prefixd.base.errors import PrefixdError


@dataclass(frozen=True, slots=True)
class Failing:
    """What becomes of a cache that fails: where that is tolerated it is left out, but for vLLM alone."""

    engines: dict[str, EngineProcess]
    left_out: dict[str, str]
    tolerant: bool

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        try:
            yield
        except PrefixdError as error:
            if not self.tolerant or name == ALONE:
                raise
            self.left_out[name] = " ".join(str(error).split())
            print(f"peers: {LABELS[name]} is left out: {error}", file=sys.stderr, flush=True)
            engine = self.engines.pop(name, None)
            if engine is not None:
                engine.kill()

    def close(self, name: str, cache: AbstractContextManager[Config]) -> None:
        """What was measured with a cache stays, should it not end in order."""
        try:
            cache.__exit__(None, None, None)
        except PrefixdError as error:
            if not self.tolerant:
                raise
            print(f"peers: {LABELS[name]} has not ended in order: {error}", file=sys.stderr, flush=True)
