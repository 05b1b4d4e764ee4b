"""In which order a slot is looked for in pages."""

from __future__ import annotations

from enum import Enum


class PageOrder(Enum):
    """The steps of an allocation, after a free slot in the page of a slot of the same prefix.

    `OWN` and `OWN_FIRST` are Jenga's (section 5.4): with `OWN` its steps 1 and 2, then the caller evicts whole pages
    (step 3); with `OWN_FIRST`, when none may go, step 4 as well, then the caller evicts single slots (step 5).
    """

    FEW_FREE = "few free"
    """An empty page while little is free inside pages, then any free slot, then an empty page."""
    OWN = "own"
    """An empty page."""
    OWN_FIRST = "own first"
    """An empty page, then any free slot."""
