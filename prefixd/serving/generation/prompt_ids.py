"""Token ids of a prompt, from text, bytes or a chat, checked against the model."""

from __future__ import annotations

import numpy as np

from prefixd.base.errors import InvalidArgumentError, PromptTooLongError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.text.chat_template import Chat
from prefixd.serving.text.tokenization import TokenIds, TooManyTokensError, need_codec


async def prompt_ids(prompt: str | bytes | Chat, model: ServedModel, tenant: Tenant) -> TokenIds:
    """Token ids of a prompt, shorter than the model's context. The work is bounded by that context.

    Args:
        prompt: text, little-endian uint32 ids, or a chat.
        model: runs the prompt.
        tenant: the caller's.

    Raises:
        InvalidArgumentError: the prompt is empty or has ids outside of the vocabulary, or the model's chat template
            does not take the chat.
        PromptTooLongError: the prompt is too long.
        UnsupportedError: the prompt is text and the model has no tokenizer.
    """
    limit = model.hello.max_model_tokens
    if isinstance(prompt, str | Chat):
        ids = await _tokenized(prompt, model, tenant)
        _check_length(len(ids), limit)
        return ids
    if not prompt:
        raise InvalidArgumentError("the prompt is empty; send text or at least one token id")
    if len(prompt) % 4:
        raise InvalidArgumentError(f"token_ids has {len(prompt)} bytes, not a multiple of 4; send little-endian uint32")
    ids = np.frombuffer(prompt, "<u4").astype(np.uint32, copy=False)
    _check_length(len(ids), limit)
    images = model.hello.images  # their placeholder may lie behind the vocabulary (Llama 3.2 Vision)
    worst = int(ids.max() if images is None else ids.max(initial=0, where=ids != images.placeholder_id))
    if worst >= model.hello.vocab_size:
        raise InvalidArgumentError(
            f"token id {worst} is outside the model's vocabulary of {model.hello.vocab_size}; "
            "tokenize with the model's own tokenizer"
        )
    return ids


async def _tokenized(text: str | Chat, model: ServedModel, tenant: Tenant) -> TokenIds:
    limit = model.hello.max_model_tokens
    if not text:
        raise InvalidArgumentError("the prompt is empty; send at least one character")
    codec = need_codec(model.codec)
    length = len(text) if isinstance(text, str) else text.characters
    if length > codec.longest_token * limit:
        raise PromptTooLongError(
            f"the prompt has {length} characters, but the model takes {limit} tokens with the output, of at "
            f"most {codec.longest_token} characters each; send at most {codec.longest_token * (limit - 1)} "
            "characters"
        )
    try:
        if isinstance(text, str):
            return await model.threads.encode(codec, text, limit, tenant.name)
        return await model.threads.encode_chat(codec, text, limit, tenant.name)
    except TooManyTokensError as error:
        raise PromptTooLongError(
            f"the prompt of {length} characters has more than {error.tokens} tokens, but the model takes "
            f"{limit} with the output; send at most {limit - 1}"
        ) from error


def _check_length(tokens: int, limit: int) -> None:
    if tokens >= limit:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens, but the model takes {limit} with the output; send at most {limit - 1}"
        )
