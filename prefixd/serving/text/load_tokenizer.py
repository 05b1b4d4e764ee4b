"""``python -m prefixd.serving.text.load_tokenizer PARENT DIRECTORY``: a model's tokenizer as a line of JSON.

transformers knows how to make a tokenizer of a model's files; to use it, the small library `tokenizers` is enough. In
the daemon, transformers would also load torch with its compiler: seconds of CPU time, in which calls wait, and memory.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from prefixd.base import heap
from prefixd.process.child import end_with_parent


def main() -> None:
    """Writes `tokenizer` (the JSON of `tokenizers`; null if it has no fast form), `splits_special` and `chat`, what
    `ChatTemplate` takes; or `error`."""
    (directory,) = end_with_parent()
    with redirect_stdout(sys.stderr):
        answer = _load(directory)
    print(json.dumps(answer))


def _load(directory: str) -> dict[str, Any]:
    # Python's way to refuse an import: transformers then takes torch for a package that is not installed, and needs
    # none for a tokenizer.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
    with heap.imports():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            return {"tokenizer": None}
        splits_special = bool(tokenizer.split_special_tokens)
        return {
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "splits_special": splits_special,
            "chat": _describe_chat(tokenizer, Path(directory)),
        }
    except Exception as error:  # it reads config.json, too, whose checks have errors of their own
        return {"error": " ".join(str(error).split())}


def _describe_chat(tokenizer: Any, directory: Path) -> dict[str, Any]:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    if template is None and (of_processor := directory / "chat_template.json").is_file():
        template = json.loads(of_processor.read_text())["chat_template"]  # where older models with images have it
    around = [getattr(tokenizer, name, None) for name in ("boi_token", "image_token", "eoi_token")]
    return {
        "source": template,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "image_tokens": around if all(around) else [],
    }


if __name__ == "__main__":
    main()
