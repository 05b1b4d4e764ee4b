"""``python -m prefixd.images.load_processor PARENT DIRECTORY``: a model's image processor in numbers, a line of JSON.

A process of its own, for the reasons of `prefixd/server/load_tokenizer.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

from prefixd import heap
from prefixd.child_process import end_with_parent


def main() -> None:
    """Writes the fields of `token_counts.ImageProcessor`, or `error`."""
    (directory,) = end_with_parent()
    with redirect_stdout(sys.stderr):
        answer = _load(directory)
    print(json.dumps(answer))


def _load(directory: str) -> dict[str, Any]:
    sys.modules["torch"] = None  # type: ignore[assignment] # refused: transformers then needs none
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with heap.imports():
        from transformers import AutoConfig, AutoImageProcessor
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        processor = AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
        counts = _counts(config, processor)
        settings = json.dumps([processor.to_dict(), counts], sort_keys=True, default=str)
    except Exception as error:  # their checks have errors of their own
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {"counts": counts, "digest": base64.b64encode(hashlib.sha256(settings.encode()).digest()).decode()}


def _counts(config: Any, processor: Any) -> dict[str, Any]:
    match config.model_type:
        case "gemma3":
            if getattr(processor, "do_pan_and_scan", False):
                raise ValueError("it cuts images into crops (do_pan_and_scan), which prefixd does not")
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
            raise ValueError(f"no rule says how many tokens an image of the family {other} has")


if __name__ == "__main__":
    main()
