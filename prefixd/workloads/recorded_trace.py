"""Writes a recorded trace in Mooncake's format, which `mooncake.read_trace` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prefixd.workloads.mooncake import HASH_TOKENS
from prefixd.workloads.part_file import open_part


class RecordedTrace:
    """A trace that is being written; a context manager, which puts the file in its place at its end.

    Requests come in the order in which they ended, and are put in order of arrival at the end. Hashes become numbers in
    the order in which they came, so the file has nothing of them.

    Args:
        file: the file; mode 0600.
        force: replace a file that exists.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """

    def __init__(self, file: Path, *, force: bool = False) -> None:
        self.file = file
        self.dropped = 0
        """Requests that the daemon had to drop."""
        self._part, self._lines = open_part(file, force=force)
        self._numbers: dict[int, int] = {}
        self._places: list[tuple[int, int, int]] = []  # (arrival in ms, offset in the file, length)
        self._prompt_tokens = self._blocks = self._offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._lines:
                if self._places:
                    self._put_in_order()
        finally:
            self._part.unlink(missing_ok=True)

    def add(self, arrival_s: float, prompt_tokens: int, output_tokens: int, hashes: Sequence[int]) -> None:
        """Writes a request.

        Args:
            arrival_s: since the begin of the recording.
            prompt_tokens, output_tokens: lengths.
            hashes: of each full block of 512 tokens, with all tokens before it.
        """
        ids = [self._numbers.setdefault(each, len(self._numbers)) for each in hashes]
        request = {
            "timestamp": max(0, round(1000 * arrival_s)),
            "input_length": prompt_tokens,
            "output_length": output_tokens,
            "hash_ids": ids,
        }
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        self._lines.write(line)
        self._places.append((max(0, round(1000 * arrival_s)), self._offset, len(line)))
        self._offset += len(line)
        self._prompt_tokens += prompt_tokens
        self._blocks += len(ids)

    def flush(self) -> None:
        """Writes what was added to the disk's files, so that it outlasts this process."""
        self._lines.flush()

    def figures(self) -> dict[str, int | str]:
        """What was recorded, as JSON types."""
        return {
            "file": str(self.file),
            "requests": len(self._places),
            "prompt_tokens": self._prompt_tokens,
            "blocks": self._blocks,
            "block_tokens": self._blocks * HASH_TOKENS,
            "different_blocks": len(self._numbers),
            "dropped_requests": self.dropped,
        }

    def _put_in_order(self) -> None:
        self._lines.flush()
        sorted_file = self.file.with_name(self.file.name + ".sorted")
        sorted_file.unlink(missing_ok=True)
        try:
            with os.fdopen(os.open(sorted_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as ordered:
                for _, offset, length in sorted(self._places):
                    self._lines.seek(offset)
                    ordered.write(self._lines.read(length))
                ordered.flush()
                os.fsync(ordered.fileno())
            sorted_file.replace(self.file)
        finally:
            sorted_file.unlink(missing_ok=True)
