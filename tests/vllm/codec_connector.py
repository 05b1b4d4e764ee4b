"""PrefixdConnector for a vLLM without Triton: the codec on the CPU stands for the kernels of `codec_on_device`.

Loaded by vLLM in place of the connector, with attention whose pages are plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engines.vllm_plain_pages import PrefixdConnector
from prefixd.integrations.vllm import worker_half

__all__ = ["PrefixdConnector"]


def codec_copies_of(groups: Sequence[Any]) -> Any:
    """In place of `object_copies_of`."""
    # Imports numba: vLLM on a CPU cannot start a worker behind that (its `_rebind_kernels` looks into every module).
    from tests.integrations.engine.copying.codec_copies import CodecCopies

    return CodecCopies(groups)


worker_half.object_copies_of = codec_copies_of
