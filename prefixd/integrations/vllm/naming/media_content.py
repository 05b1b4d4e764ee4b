"""Identifies the images and other media of a request by digests of their content.

vLLM's own identifiers do not do that. They are hashes of the raw media in most modes, a count of the process's requests
if both of vLLM's caches are off, and any text that a client sends as a uuid; none of them covers the settings and files
of the processor. So a medium is named by a digest of the features that the processor made of it: the model reads
nothing else. vLLM hands them to its scheduler with the request, except when they are in shared memory
(`--mm-processor-cache-type shm`).

vLLM trusts its identifiers: it reuses embeddings by them, and its prefix cache finds blocks by them. So when two
contents have come under one identifier, vLLM's blocks may be of either. From then on prefixd saves no block that a
medium of that identifier reaches into or precedes.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from uuid import uuid4

import numpy as np
import torch

_new_hash: Callable[[], Any]
try:
    _new_hash = import_module("blake3").blake3  # vLLM brings it; it is three times as fast
except ImportError:
    _new_hash = hashlib.sha256

_LEAST_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium and its place in the prompt, in tokens."""

    content: str
    """Equal for equal known content; unique if the content is not known."""
    offset: int
    length: int


@dataclass(slots=True)
class RequestMedia:
    """The media of one request."""

    media: tuple[Medium, ...]
    known_tokens: float
    """Tokens before the first medium of unknown content; infinite without one."""
    _identified: tuple[tuple[int, str], ...] = field(repr=False)
    _sure_tokens: float = float("inf")
    _checked_conflicts: int = -1


class MediaContents:
    """Finds the media of requests, and remembers the content of vLLM's identifiers.

    Args:
        remembered: how many identifiers to remember; more than vLLM can hold blocks of.
        believed: False if vLLM's embeddings may come from another process, which has identifiers of its own.
    """

    def __init__(self, remembered: int, *, believed: bool = True) -> None:
        self._remembered = max(_LEAST_REMEMBERED, remembered)
        self._believed = believed
        self._contents: OrderedDict[str, str | None] = OrderedDict()  # by identifier; None: several, or not known
        self._conflicts = 0
        self._digests = _Digests()

    def of(self, features: Sequence[Any]) -> RequestMedia:
        """The media of a request that has arrived. Reads all their bytes, of each item once.

        Args:
            features: vLLM's `Request.mm_features`.
        """
        media: list[Medium] = []
        known = float("inf")
        for feature in features:
            place = feature.mm_position
            content = self._digests.of(feature.data) if self._believed else None
            self._remember(feature.identifier, content)
            if content is None:
                known = min(known, place.offset)
            mask = getattr(place, "is_embed", None)
            # The mask marks the tokens that are embeddings; the others are text.
            embedded = "" if mask is None else hashlib.sha256(np.packbits(np.asarray(mask, bool)).tobytes()).hexdigest()
            name = f"{feature.modality} {content or uuid4().hex} {embedded}"
            media.append(Medium(name, place.offset, place.length))
        identified = tuple((feature.mm_position.offset, feature.identifier) for feature in features)
        return RequestMedia(tuple(media), known, identified)

    def sure_tokens(self, request: RequestMedia) -> float:
        """How many of the request's tokens vLLM has certainly computed from these media: the ones before the first
        medium with an identifier that has had another content."""
        if request._checked_conflicts != self._conflicts:
            request._checked_conflicts = self._conflicts
            unsure = (at for at, identifier in request._identified if self._contents.get(identifier) is None)
            request._sure_tokens = min(unsure, default=float("inf"))
        return request._sure_tokens

    def distrust(self) -> None:
        """Treats all media as unknown from now on, since vLLM receives some that it does not show here."""
        self._believed = False
        for identifier in self._contents:
            self._contents[identifier] = None
        self._conflicts += 1

    def _remember(self, identifier: str, content: str | None) -> None:
        if self._contents.setdefault(identifier, content) != content:
            content = None
        if content is None:
            self._conflicts += 1
        self._contents[identifier] = content
        self._contents.move_to_end(identifier)
        if len(self._contents) > self._remembered:
            self._contents.popitem(last=False)


class _Digests:
    """Digests of processed items, each of which is read once: vLLM's cache hands the same object to many requests."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], str | None]] = {}

    def of(self, item: Any) -> str | None:
        """A digest of an item's content; None if the content is elsewhere."""
        if item is None or "address" in item:  # in shared memory
            return None
        key = id(item)
        known = self._known.get(key)
        if known is not None and known[0]() is item:
            return known[1]
        digest = digest_of({name: element.data for name, element in item.items()})
        self._known[key] = weakref.ref(item, lambda gone: self._forget(key, gone)), digest
        return digest

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        if key in self._known and self._known[key][0] is gone:
            del self._known[key]


def digest_of(value: Any) -> str | None:
    """A cryptographic digest of nested tensors, over dtypes, shapes, names and bytes; None if a value's content is
    unknown."""
    hasher = _new_hash()
    try:
        for piece in _pieces(value):
            hasher.update(piece)
    except _Unknown:
        return None
    return str(hasher.hexdigest())


class _Unknown(Exception):
    """The content of a value is unknown."""


def _pieces(value: Any) -> Iterable[Any]:
    """Bytes that no other value has, in pieces; values of variable length begin with their length."""
    if isinstance(value, Mapping):
        yield b"m%d:" % len(value)
        for name in sorted(value):
            yield from _pieces(str(name))
            yield from _pieces(value[name])
    elif isinstance(value, list | tuple):
        yield b"l%d:" % len(value)
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        yield repr(("tensor", str(plain.dtype), tuple(plain.shape))).encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield repr(("array", value.dtype.str, value.shape)).encode()
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    elif isinstance(value, str | bytes | bool | int | float | np.generic):
        text = repr((type(value).__name__, value)).encode()
        yield b"v%d:" % len(text)
        yield text
    else:  # None too: vLLM leaves out what it has sent before
        raise _Unknown
