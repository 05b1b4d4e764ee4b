"""Checks whether a model can be another one's draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixd.worker_protocol.errors import ModelError

if TYPE_CHECKING:
    from prefixd.worker.spec.model_spec import ModelSpec

_TOKENIZER = "tokenizer.json"


def check_draft(spec: ModelSpec, draft: ModelSpec) -> None:
    """Refuse a draft that cannot propose tokens for the model. Raises ModelError.

    Of two tokenizers the tokens and their ids are compared, where both directories have a tokenizer.json.
    """
    for each in (spec, draft):
        if each.groups.state is not None:
            raise ModelError(
                f"{_named(each)} has recurrent layers, whose state cannot go back to before a token that was proposed "
                "and not accepted; leave worker.draft_model out, or use models of attention layers alone"
            )
        if each.images is not None:
            raise ModelError(
                f"{_named(each)} reads images, which no draft knows of; leave worker.draft_model out, or use models of "
                "text alone"
            )
    if draft.vocab_size != spec.vocab_size:
        raise ModelError(
            f"the draft {_named(draft)} has a vocabulary of {draft.vocab_size} tokens and {_named(spec)} one of "
            f"{spec.vocab_size}; set worker.draft_model to a model with the same tokens"
        )
    if draft.max_model_tokens < spec.max_model_tokens:
        raise ModelError(
            f"the draft {_named(draft)} takes {draft.max_model_tokens} tokens and {_named(spec)} "
            f"{spec.max_model_tokens}; set worker.draft_model to a model that takes as many"
        )
    theirs, ours = (_vocabulary(each.path / _TOKENIZER) for each in (draft, spec))
    if theirs is not None and ours is not None and theirs != ours:
        token, number = next(iter(sorted(set(theirs.items()) ^ set(ours.items()), key=str)))
        raise ModelError(
            f"the draft {_named(draft)} and {_named(spec)} have different tokenizers: {token!r} is token {number} of "
            "one of them alone; set worker.draft_model to a model with the same tokenizer"
        )


def _named(spec: ModelSpec) -> str:
    return f"model {str(spec.path)!r}"


def _vocabulary(path: Path) -> dict[str, int] | None:
    """Every token's id; None without a file. Raises ModelError for one that cannot be read."""
    if not path.is_file():
        return None
    try:
        tokenizer: Any = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: Any = tokenizer["model"]["vocab"]
        tokens: dict[str, int] = (
            dict(vocabulary)
            if isinstance(vocabulary, dict)
            else {piece[0]: number for number, piece in enumerate(vocabulary)}  # Unigram: a list of tokens and scores
        )
        return tokens | {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {type(error).__name__}: {error}") from error
