"""Handles differences between the secondary tiers of vLLM's releases (0.29 to 0.33).

0.29              a job names its chunks `block_ids`
0.31              tiers are given a `backpressure_detector`; results have `transfer_bytes`
0.32              tiers have a `cache_hit_source`
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import FrameType
from typing import Any

import vllm

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.contract import BaseClass, Contract, names_in
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.releases import WORKS_WITH

_TIERS = "vllm.v1.kv_offload.tiering."

_NAMES = frozenset(
    {
        "vllm.v1.kv_offload.base:LookupResult",
        "vllm.v1.kv_offload.base:RequestOffloadingContext",
        f"{_TIERS}base:JobResult",
        f"{_TIERS}async_lookup:AsyncLookupManager.mark_miss",
        "vllm.platforms:current_platform",
    }
)
_CALLED = names_in(
    "",
    "lookup submit_store submit_load get_finished_jobs on_new_request on_request_finished on_schedule_end drain_jobs "
    "shutdown",
)
# Defaults that are right for prefixd: it serves no other engine itself, and all its work is in vLLM's list of jobs.
_KNOWN = names_in(
    "",
    "block_size_bytes bp_detector has_pending_work take_events touch serve_external_requests build_metric_definitions "
    "get_stats config_info_keys config_info",
)


def check_release() -> None:
    """Checks that vLLM has the names that PrefixdTier uses. Raises ConfigError, with the missing ones in one line."""
    base = BaseClass(f"{_TIERS}base:SecondaryTierManager", _CALLED, _KNOWN)
    Contract("vLLM", vllm.__version__, WORKS_WITH, _NAMES, (base,)).check(log)


def base_arguments(**arguments: Any) -> dict[str, Any]:
    """The members of `arguments` that this release's `SecondaryTierManager` takes."""
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    known = inspect.signature(SecondaryTierManager.__init__).parameters
    return {name: value for name, value in arguments.items() if name in known}


def chunk_ids(job: Any) -> list[int]:
    """The row numbers of a job's chunks in vLLM's host pool, in the order of its keys."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(chunk) for chunk in ids]


def job_result(**fields: Any) -> Any:
    """A `JobResult` with the members of `fields` that this release's class has."""
    from vllm.v1.kv_offload.tiering.base import JobResult

    known = {field.name for field in dataclasses.fields(JobResult)}
    return JobResult(**{name: value for name, value in fields.items() if name in known})


def callers_configuration() -> tuple[Any, Any]:
    """vLLM's configuration and its KV cache's, from the stack frame of the connector that is making the tier.

    vLLM gives a tier names and sizes only, which do not distinguish two models. Raises ConfigError outside of an
    `OffloadingConnector`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if "vllm_config" in names and "kv_cache_config" in names:
            return names["vllm_config"], names["kv_cache_config"]
        frame = frame.f_back
    raise ConfigError(
        f"vLLM {vllm.__version__} does not make PrefixdTier from its OffloadingConnector, so that the tier cannot know "
        "the model; use PrefixdConnector as the kv_connector instead"
    )
