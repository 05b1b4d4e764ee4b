"""vLLM's tiered offloading on a CPU, which vLLM refuses: its own spec and manager, with copies that need no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """What `OffloadingConnector` loads by its module path."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                self._engine_id,
                self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks,  # as vLLM 0.29 calls it
                self.config.parallel.rank,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies at once, in the thread that asks."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._engine = [cache.tensor.numpy() for cache in kv_caches.tensors]
        self._page_bytes = [cache.page_size_bytes for cache in kv_caches.tensors]
        self._pool = [region.create_next_worker_view(size * blocks_per_chunk).numpy() for size in self._page_bytes]
        self._region = region
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, page in self._pairs(src_spec, _chunks(dst_spec)):
            np.copyto(page, block)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, *_: Any, **__: Any) -> bool:
        for block, page in self._pairs(dst_spec, _chunks(src_spec)):
            np.copyto(block, page)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: all copies have been made."""

    def shutdown(self) -> None:
        self._pool.clear()
        self._region.cleanup()

    def _pairs(self, blocks: Any, chunks: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(the engine's bytes, the pool's) of each block and layer."""
        pairs = []
        first_block = first_chunk = 0
        for refs, count, index in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = index % self._blocks_per_chunk if count else 0
            for place in range(count):
                block = blocks.block_ids[first_block + place]
                chunk, inside = divmod(skipped + place, self._blocks_per_chunk)
                for ref in refs:
                    page, size = self._page_bytes[ref.tensor_idx], ref.page_size_bytes
                    row = self._pool[ref.tensor_idx][chunks[first_chunk + chunk]]
                    pairs.append(
                        (self._engine[ref.tensor_idx][block][:size], row[inside * page : inside * page + size])
                    )
            first_block += count
            first_chunk += -(-(skipped + count) // self._blocks_per_chunk) if count else 0
        return pairs


def _chunks(spec: Any) -> Sequence[int]:
    return spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids
