"""Rewrites a model's layers so that a pass has fewer operators: merged projections, one operator a norm, compiled
element-wise functions. `rewrite` compares the logits before and after, and undoes what changes them."""

from prefixd.worker.operators.rewrites import Operators, Rewritten, rewrite

__all__ = ["Operators", "Rewritten", "rewrite"]
