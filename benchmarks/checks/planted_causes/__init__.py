"""Causes of late first tokens, planted for `benchmarks.checks.why`."""
