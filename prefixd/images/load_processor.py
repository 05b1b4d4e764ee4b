"""Loads a model's image processor with transformers, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import msgspec

from prefixd.base import heap
from prefixd.images.token_counts import ImageProcessor


def load_processor(directory: str) -> tuple[Any, ImageProcessor]:
    """Returns transformers' image processor of a model directory, and its description for the daemon. Takes seconds.

    Call it in a process of its own, for the reasons in `serving/text/load_tokenizer.py`. Raises transformers' errors.
    """
    sys.modules["torch"] = None  # type: ignore[assignment] # an import fails, and transformers works without torch
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with heap.imports():
        from transformers import AutoConfig, AutoImageProcessor
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
    counts = _describe_counts(config, processor)
    settings = json.dumps([processor.to_dict(), counts], sort_keys=True, default=str)
    described = {"counts": counts, "digest": hashlib.sha256(settings.encode()).digest()}
    return processor, msgspec.convert(described, ImageProcessor)


def _describe_counts(config: Any, processor: Any) -> dict[str, Any]:
    """Returns the fields of a class of `token_counts.py`, with its tag as `type`."""
    match config.model_type:
        case "gemma3":
            if getattr(processor, "do_pan_and_scan", False):
                raise ValueError("it cuts images into crops (do_pan_and_scan), which prefixd does not support")
            return {"type": "fixed", "count": config.mm_tokens_per_image}
        case "mllama":
            return {"type": "fixed", "count": 1}
        case "qwen2_5_vl":
            return {
                "type": "grid",
                "side": processor.patch_size * processor.merge_size,
                "least_pixels": processor.size["shortest_edge"],
                "most_pixels": processor.size["longest_edge"],
            }
        case "llava_onevision":
            size = processor.size
            side = size["shortest_edge"] if "shortest_edge" in size else min(size["height"], size["width"])
            return {
                "type": "tiles",
                "side": side,
                "patches": config.vision_config.image_size // config.vision_config.patch_size,
                "most_tiles": int(config.vision_aspect_ratio.removeprefix("anyres_max_")),
                "resolutions": [list(each) for each in processor.image_grid_pinpoints],
            }
        case other:
            raise ValueError(f"prefixd does not know how many tokens an image has in models of the type {other}")
