"""Reads and writes warm-up files: the prefixes that a new host should have, a JSON object a line.

```
{"namespace_id": "5f1e...", "tenant": "default", "model": "", "namespace": {"name": "my-model", "blockTokens": 16, ...}}
{"namespace_id": "5f1e...", "key": "9f86d081...", "blocks": 128, "token_ids": [1, 15043, ...]}
{"prompt": "You are a helpful assistant.", "model": ""}
```

A namespace comes before its prefixes. Prompts are written by hand, for a model of the daemon; so are `token_ids` with a
`model` and without a namespace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefixd.base.errors import ConfigError
from prefixd.workloads.part_file import open_part

MOST_PREFIXES = 100_000
MOST_BYTES = 1 << 30
_LINE_BYTES = 32 << 20
"""A prompt of a million tokens takes 7 MB."""


@dataclass(frozen=True, slots=True)
class WarmNamespace:
    """A namespace of the recording host.

    Attributes:
        namespace_id: the same on every host.
        tenant: its owner.
        model: the model of the daemon that fills it; empty for an engine's.
        namespace: the contract's message as JSON.
    """

    namespace_id: bytes
    tenant: str
    model: str
    namespace: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """A prefix: by its key, by its token ids, or both; or a text."""

    line: int
    """Its place in the file."""
    namespace: WarmNamespace | None = None
    key: str = ""
    token_ids: Sequence[int] | None = field(default=None, repr=False)
    prompt: str | None = field(default=None, repr=False)
    model: str = ""


class WarmFile:
    """A warm-up file that is being written; a context manager, which puts the file in its place at its end.

    Args:
        file: the file; only its owner may read it.
        force: replace a file that exists.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """

    def __init__(self, file: Path, *, force: bool = False) -> None:
        self.file = file
        self.prefixes = 0
        self._bytes = 0
        self._known: set[bytes] = set()
        self._part, self._lines = open_part(file, force=force)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._lines:
                if kind is None:
                    self._lines.flush()
                    os.fsync(self._lines.fileno())
            if kind is None:
                self._part.replace(self.file)
        finally:
            self._part.unlink(missing_ok=True)

    def add(self, namespace: WarmNamespace, key: str, blocks: int, token_ids: Sequence[int] | None) -> bool:
        """Writes a prefix, its namespace before its first one; returns False if the file is full."""
        if self.prefixes >= MOST_PREFIXES:
            return False
        prefix: dict[str, Any] = {"namespace_id": namespace.namespace_id.hex(), "key": key, "blocks": blocks}
        if token_ids is not None:
            prefix["token_ids"] = list(token_ids)
        line = _line(prefix)
        if self._bytes + len(line) > MOST_BYTES:
            return False
        if namespace.namespace_id not in self._known:
            self._known.add(namespace.namespace_id)
            self._write(
                _line(
                    {
                        "namespace_id": namespace.namespace_id.hex(),
                        "tenant": namespace.tenant,
                        "model": namespace.model,
                        "namespace": namespace.namespace,
                    }
                )
            )
        self._write(line)
        self.prefixes += 1
        return True

    def _write(self, line: bytes) -> None:
        self._lines.write(line)
        self._bytes += len(line)


def read_warm_file(file: Path) -> Iterator[WarmPrefix]:
    """Yields the prefixes of a file in order.

    Raises:
        ConfigError: the file cannot be read, is too large, or a line of it is wrong.
    """
    known: dict[str, WarmNamespace] = {}
    count = 0
    try:
        with file.open("rb") as lines:
            number = 0
            while line := lines.readline(_LINE_BYTES + 1):
                number += 1
                if len(line) > _LINE_BYTES:
                    raise ConfigError(f"{file}, line {number}: it has more than {_LINE_BYTES} bytes; divide the prompt")
                if not line.strip():
                    continue
                found = _read_line(f"{file}, line {number}", number, line, known)
                if found is None:
                    continue
                count += 1
                if count > MOST_PREFIXES:
                    raise ConfigError(f"{file} has more than {MOST_PREFIXES} prefixes; divide it")
                yield found
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); write it with `prefixd warm record`") from error


def _read_line(place: str, number: int, line: bytes, known: dict[str, WarmNamespace]) -> WarmPrefix | None:
    """The prefix of a line; None for a namespace, which becomes known."""
    try:
        read = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: it is no JSON ({error})") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{place}: it is no JSON object; write one a line")
    model, identity = _text(place, read, "model"), _text(place, read, "namespace_id")
    if "namespace" in read:
        if not isinstance(read["namespace"], dict):
            raise ConfigError(f"{place}: namespace must be an object")
        try:
            namespace_id = bytes.fromhex(identity)
        except ValueError:
            raise ConfigError(f"{place}: namespace_id {identity!r} is not hex") from None
        known[identity] = WarmNamespace(namespace_id, _text(place, read, "tenant"), model, read["namespace"])
        return None
    if identity and identity not in known:
        raise ConfigError(f"{place}: namespace_id {identity!r} has no line with its namespace before this one")
    tokens = read.get("token_ids")
    if tokens is not None and not (
        isinstance(tokens, list) and tokens and all(type(token) is int and 0 <= token < 1 << 32 for token in tokens)
    ):
        raise ConfigError(f"{place}: token_ids must be a list of numbers from 0 to {(1 << 32) - 1}, one at least")
    prompt, key = read.get("prompt"), _text(place, read, "key")
    if prompt is not None and not (isinstance(prompt, str) and prompt):
        raise ConfigError(f"{place}: prompt must be a text, and not an empty one")
    if identity and not (key or tokens):
        raise ConfigError(f"{place}: a prefix of a namespace needs a key or token_ids")
    if not identity and (prompt is None) == (tokens is None):
        raise ConfigError(f"{place}: give namespace_id with key or token_ids; or for a model, prompt or token_ids")
    return WarmPrefix(number, known.get(identity), key, tokens, prompt, model)


def _text(place: str, read: dict[str, Any], name: str) -> str:
    value = read.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {name} must be a text")
    return value


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
