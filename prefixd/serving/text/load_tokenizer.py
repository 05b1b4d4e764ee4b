"""``python -m prefixd.serving.text.load_tokenizer PARENT DIRECTORY``: a model's tokenizer as a line of JSON.

transformers knows how to make a tokenizer of a model's files; to use it, the small library `tokenizers` is enough. In
the daemon, transformers would also load torch with its compiler: seconds of CPU time, in which calls wait, and memory.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

from prefixd.base import heap
from prefixd.process.child import end_with_parent


def main() -> None:
    """Writes `tokenizer` (the JSON of `tokenizers`; null if it has no fast form) and `splits_special`, or `error`."""
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
        return {"tokenizer": tokenizer.backend_tokenizer.to_str(), "splits_special": splits_special}
    except Exception as error:  # it reads config.json, too, whose checks have errors of their own
        return {"error": " ".join(str(error).split())}


if __name__ == "__main__":
    main()
