"""The connector in one of vLLM's workers: copies between its KV cache and the daemon's memory."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm

from prefixd.client import PartShape
from prefixd.integrations.engine.connector_counters import ConnectorCounters
from prefixd.integrations.engine.copying.block_transfers import Transfers
from prefixd.integrations.engine.copying.cuda_device import fence_of, object_copies_of, page_copies_of
from prefixd.integrations.engine.copying.group_pages import GroupPages
from prefixd.integrations.engine.daemon_link import Link
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.vllm.coded_groups import paged_layers
from prefixd.integrations.vllm.geometry import layer_names, read_pages
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.naming.page_packing import Packing, probe_pages
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd.integrations.vllm.page_axes import part_shape
from prefixd.integrations.vllm.step_messages import Orders
from prefixd_swap import create_copy_engine

if TYPE_CHECKING:
    from prefixd_swap.codecs.on_device.object_copies import ObjectCopies

_IDLE_POLL_S = 0.005


class WorkerHalf:
    """Loads and saves this rank's blocks as the scheduler half orders."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, geometry: Geometry, options: ConnectorOptions) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._geometry = geometry
        self._options = options
        self.counters = ConnectorCounters()
        self.packing = Packing("")
        self._ordinal: int | None = None
        self._transfers: Transfers | None = None
        self._saved_step = -1
        self._layers = {name: place for place, name in enumerate(layer_names(kv_cache_config, geometry.groups[0]))}

    @property
    def transfers(self) -> Transfers:
        assert self._transfers is not None, "vLLM has not registered its KV cache"
        return self._transfers

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        device = next(iter(kv_caches.values())).device
        pages = read_pages(self._kv_cache_config, kv_caches, self._geometry)
        versions = f"vllm {vllm.__version__}, torch {torch.__version__}"
        probed = probe_pages(self._vllm_config, kv_caches, versions)
        self.packing = Packing(probed.digest, tuple(self._shapes(pages, kv_caches, probed.plain)))
        self._ordinal = None if device.type == "cpu" else device.index or 0
        objects = self._object_copies(pages, kv_caches, probed.plain)
        link = Link(self._options.address, f"vllm worker {rank}", self._options.timeout_s, log)
        link.wait_first()
        engine = create_copy_engine("cpu" if self._ordinal is None else f"cuda:{self._ordinal}", threads=1)
        copies = page_copies_of(self._ordinal, self._geometry, log) if objects is None else None
        self._transfers = Transfers(
            link, self._geometry, pages, rank, engine, self.counters, self._ordinal, copies, objects
        )

    def _object_copies(
        self, pages: Sequence[GroupPages], kv_caches: dict[str, torch.Tensor], plain: Container[str]
    ) -> ObjectCopies | None:
        """The copies of int8 objects, if the option asks for these. Raises ConfigError where there are none."""
        if self._options.codec_on_device is None:
            return None
        layers = []
        for group, group_pages in zip(self._geometry.groups, pages, strict=True):
            names = layer_names(self._kv_cache_config, group)
            known = all(name in plain for name in names)
            layers.append(paged_layers(group, group_pages, [kv_caches[name] for name in names], known))
        return object_copies_of(layers)

    def _shapes(
        self, pages: Sequence[GroupPages], kv_caches: dict[str, torch.Tensor], plain: Container[str]
    ) -> Iterator[PartShape | None]:
        for group, group_pages in zip(self._geometry.groups, pages, strict=True):
            names = layer_names(self._kv_cache_config, group)
            known = not group.state and all(name in plain for name in names)
            tensors = [kv_caches[name] for name in names]
            yield part_shape(self._geometry, group, group_pages, tensors) if known else None

    def start_loads(self, orders: Orders) -> None:
        """Starts a step's loads before vLLM submits it; on a GPU an earlier step may still use the target blocks."""
        if not orders.loads:
            return
        fence = fence_of(self._ordinal)
        for job in orders.loads:
            self.transfers.load(job, fence)

    def wait_for_layer(self, layer_name: str) -> None:
        place = self._layers.get(layer_name)
        if place is not None:
            self.transfers.wait_for_layer(place)

    def start_saves(self, orders: Orders) -> None:
        """Starts a step's saves after vLLM submitted it (a GPU may still compute it); does nothing the second time."""
        if orders.step == self._saved_step:
            return
        self._saved_step = orders.step
        if any(job.waits for job in orders.loads):
            self.transfers.wait_for_loads_of_step()
        if orders.saves:
            self.transfers.save(orders.saves, fence_of(self._ordinal))
        if orders.idle:
            self.transfers.wait_for_any(_IDLE_POLL_S)

    def close(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
