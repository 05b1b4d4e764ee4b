"""The connector's logger, below vLLM's own, so that vLLM's configuration of logging holds for it."""

from __future__ import annotations

import logging

log = logging.getLogger("vllm.prefixd")
