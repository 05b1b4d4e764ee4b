"""Parameters of which `make test` runs some, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """`values` as parameters; those that are not in `fast` are marked slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
