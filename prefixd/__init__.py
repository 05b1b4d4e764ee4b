"""prefixd: a tiered prefix cache for LLM inference."""

from __future__ import annotations

__version__ = "0.1.0"
