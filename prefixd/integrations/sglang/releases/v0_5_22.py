"""SGLang 0.5.22: a storage's configuration does not say which rank writes."""

from __future__ import annotations

from typing import Any

NAMES = frozenset[str]()


def is_storage_writer(config: Any) -> bool:
    """Whether this rank writes the pages that all ranks have: SGLang's controller lets only rank 0 write them."""
    return not config.is_mla_model or config.tp_rank == 0
