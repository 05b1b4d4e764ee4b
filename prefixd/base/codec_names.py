"""Names of codecs: how the bytes of a block are stored in tiers that are read and written by calls."""

from __future__ import annotations

from typing import Literal, get_args

CodecName = Literal["exact", "lossless", "int8", "k8v4"]

CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
"""The codec that alters least first."""
LOSSY: frozenset[CodecName] = frozenset({"int8", "k8v4"})
"""Codecs whose bytes do not decode to exactly the bytes that were stored."""
CODECS_EXTRA = "codecs"
"""The extra of pyproject.toml that all codecs but `exact` need."""
