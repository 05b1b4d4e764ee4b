"""All figures, in the order of the page."""

from __future__ import annotations

from benchmarks.papers_parts.figure import Figure
from benchmarks.papers_parts.vtensor_figures import VTENSOR_FIGURES

FIGURES: tuple[Figure, ...] = (*VTENSOR_FIGURES,)
