"""Connectors that stand beside PrefixdConnector in vLLM's MultiConnector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


class NeutralConnector(KVConnectorBase_V1, SupportsHMA):
    """Has nothing, and keeps nothing."""

    requires_kv_delivery = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler, as NIXL's agents do."""

    tensors: int


class ShakingConnector(NeutralConnector):
    """Like vLLM's NIXL it has handshake metadata, refuses those of other connectors, and cannot do without."""

    _tensors = 0
    _shaken = False

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._tensors = len(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake(self._tensors)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for rank, of_rank in metadata.items():
            if not isinstance(of_rank, Handshake) or not of_rank.tensors:
                raise ValueError(f"rank {rank} has the handshake metadata of another connector: {of_rank}")
        self._shaken = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._shaken, "no rank has told its handshake metadata"
        return 0, False


class LoadingConnector(NeutralConnector):
    """Says that it loads the first `tokens` of every prompt, within the step (with `async`, before it)."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        extra = self._kv_transfer_config.kv_connector_extra_config
        return max(0, extra["tokens"] - num_computed_tokens), extra.get("async", False)


def beside(name: str, **extra: Any) -> dict[str, Any]:
    """The configuration of one of these as a child of MultiConnector."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def multi(*children: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with these children."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
        **fields,
    }
