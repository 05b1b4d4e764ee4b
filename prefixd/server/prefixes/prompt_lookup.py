"""Prompts that operators write: finds their cached prefix, and shows cached blocks as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from prefixd.base.errors import InvalidArgumentError, NotFoundError, PreconditionError, UnsupportedError
from prefixd.cache import Namespace, TieredCache
from prefixd.cache.placement.paths import find_path
from prefixd.serving.generation.prompt_ids import prompt_ids
from prefixd.serving.models.model_host import ModelHost
from prefixd.serving.models.served_model import ServedModel
from prefixd.v1 import admin_pb2 as pb


class PromptLookup:
    """Finds prompts without counting as their use.

    Args:
        cache: the cache.
        models: by name, first the default model; none in a sidecar.
    """

    def __init__(self, cache: TieredCache, models: Mapping[str, ModelHost]) -> None:
        self._cache = cache
        self._models = models

    async def find(self, request: pb.FindPrefixRequest) -> pb.FindPrefixResponse:
        """Returns the longest cached prefix of a prompt.

        Raises:
            InvalidArgumentError: there is no prompt, or the model cannot take it.
            NotFoundError: nothing of it is cached, or there is no such model or namespace.
            PreconditionError: the model is not loaded.
            UnsupportedError: the prompt is text and the model has no tokenizer, or the daemon has no model.
        """
        cache = self._cache
        named = cache.namespaces.get(request.namespace_id) if request.namespace_id else None
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgumentError("no prompt was sent; send text or token_ids")
        if kind == "text":
            model = self._model(request.model)
            ids = await prompt_ids(request.text, model, cache.tenants.default)
            token_ids = np.asarray(ids, "<u4").tobytes()
        else:
            token_ids = request.token_ids
        namespace = named if named is not None else self._namespace(self._model(request.model))
        trie, chain = cache.trie(namespace), cache.chain(namespace, token_ids)
        rows = trie.usable(await find_path(trie, namespace, chain))
        if not len(rows):
            raise NotFoundError(
                f"nothing of the prompt's {len(token_ids) // 4} tokens is cached in namespace "
                f"{namespace.spec.name!r}, which has blocks of {trie.block_tokens} tokens; `prefixd ls` shows what is"
            )
        last = int(rows[-1])
        owner = cache.namespaces.at(int(trie.namespace[last]))  # the common namespace has blocks that many tenants sent
        return pb.FindPrefixResponse(
            key=f"{owner.id.hex()}/{trie.key(last).hex()}",
            tokens=len(rows) * trie.block_tokens,
            prompt_tokens=len(token_ids) // 4,
        )

    async def add_text(self, answer: pb.InspectResponse) -> None:
        """Adds the text of the blocks of an answer, if a model with a tokenizer has computed them."""
        namespace = self._cache.namespaces.get(answer.prefix.namespace_id)
        model = next((each for each in self._ready() if each.namespace.name == namespace.spec.name), None)
        if model is None or model.codec is None or not namespace.spec.worker:
            return
        ids = [list(block.token_ids) for block in answer.blocks]
        for block, text in zip(answer.blocks, await model.threads.load(model.codec.texts, ids), strict=True):
            block.text = text

    def add_models(self, prefixes: Iterable[pb.PrefixInfo]) -> None:
        """Names in each prefix the model whose worker computed it."""
        names = {host.namespace_name: host.name for host in reversed([*self._models.values()])}
        for prefix in prefixes:
            with suppress(NotFoundError):  # the namespace was forgotten meanwhile
                spec = self._cache.namespaces.get(prefix.namespace_id).spec
                prefix.model = names.get(spec.of_prompts, "") if spec.worker else ""

    def _ready(self) -> list[ServedModel]:
        return [host.loaded for host in self._models.values() if host.loaded is not None]

    def _model(self, name: str) -> ServedModel:
        if not self._models:
            raise UnsupportedError(
                "this daemon has no model, whose tokenizer and namespace the prompt needs; send token_ids and a "
                "namespace_id (`prefixd stats` shows them)"
            )
        host = self._models.get(name) if name else next(iter(self._models.values()))
        if host is None:
            raise NotFoundError(f"there is no model {name!r}; the daemon has: {', '.join(self._models)}")
        if host.loaded is None:
            raise PreconditionError(f"model {host.name} is not loaded yet; try again when `prefixd stats` says ready")
        return host.loaded

    def _namespace(self, model: ServedModel) -> Namespace:
        namespace = self._cache.namespaces.find(model.namespace)
        if namespace is None:
            raise NotFoundError(f"model namespace {model.namespace.name!r} has no cached block yet")
        return namespace
