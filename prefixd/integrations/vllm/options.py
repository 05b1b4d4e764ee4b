"""Options of the connector and of the scheduler, from vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prefixd.integrations.engine.options import EngineOptions, parse_options
from prefixd_scheduler import POLICIES


class ConnectorOptions(EngineOptions):
    """Settings of the connector and of the scheduler; vLLM hands them over as they stand in its own configuration.

    Of `prefetch` requests FastestPrefixFirstScheduler gets the leases as well.
    """

    load: Literal["async", "layerwise"] = "async"
    """async: a request waits outside the batch until its prefix is there. layerwise: it joins the batch at once, and
    each layer waits for its own part of the prefix (models with one KV cache group)."""
    codec_on_device: Literal["int8"] | None = None
    """int8: keys and values become 8 bits on the GPU while they are packed, so the bus, host memory, disk and a shared
    store have about half of the bytes. A block that this would alter too much is not saved. Needs Triton and bfloat16
    or float16. Engines with and without it share no blocks. Unverified on a GPU."""
    cross_layer_blocks: bool = False
    """Whether vLLM is asked for a KV cache in which the layers of a block lie together, where its attention takes it. A
    block is then copied without a kernel. Beside a connector that asks for another layout (NIXL, vLLM's offloading)
    vLLM refuses to start. Not yet measured."""
    policy: Literal["fcfs", "fpf", "relaxed-fpf", "lpm", "shortest-ready", "deadline"] = "relaxed-fpf"
    """Order of the waiting queue under FastestPrefixFirstScheduler, by a policy of `prefixd_scheduler`."""
    starvation_bound_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """For the policies that may starve: a request that has waited this long goes before all that have not."""
    look_ahead: Annotated[int, Field(ge=1, le=65536)] = 64
    """How many waiting requests of each kind FastestPrefixFirstScheduler reads the cached prefixes of again in a step:
    the next ones in order, those without an answer from prefixd, and the others in turn."""

    @model_validator(mode="after")
    def _check_starvation_bound(self) -> Self:
        if self.starvation_bound_s is not None and not POLICIES[self.policy].may_starve:
            raise ValueError(f"the policy {self.policy} starves nobody; leave starvation_bound_s out")
        return self

    @model_validator(mode="after")
    def _check_codec_on_device(self) -> Self:
        if self.codec_on_device is not None and self.codec is not None:
            raise ValueError(
                f"codec = {self.codec} and codec_on_device = {self.codec_on_device} would code blocks twice; set one"
            )
        if self.codec_on_device is not None and self.load == "layerwise":
            raise ValueError(
                'codec_on_device makes one object of all layers of a block, and load = "layerwise" needs one layer at '
                'a time; use load = "async"'
            )
        return self

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> ConnectorOptions:
        """The options in vLLM's `kv_connector_extra_config`. Raises ConfigError with one line."""
        return parse_options(cls, dict(extra or {}), "kv_connector_extra_config", "the configuration")
