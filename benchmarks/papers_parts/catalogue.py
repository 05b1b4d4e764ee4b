"""All figures, in the order of the page."""

from __future__ import annotations

from benchmarks.papers_parts.figure import Figure
from benchmarks.papers_parts.jenga_figures import JENGA_FIGURES
from benchmarks.papers_parts.prefix_cache_figures import PREFIX_CACHE_FIGURES
from benchmarks.papers_parts.talk_figures import TALK_FIGURES
from benchmarks.papers_parts.vattention_figures import VATTENTION_FIGURES
from benchmarks.papers_parts.vtensor_figures import VTENSOR_FIGURES

FIGURES: tuple[Figure, ...] = (
    *PREFIX_CACHE_FIGURES,
    *VTENSOR_FIGURES,
    *VATTENTION_FIGURES,
    *JENGA_FIGURES,
    *TALK_FIGURES,
)
