"""Measurements. `python -m benchmarks.NAME --help` says what one measures; `--json FILE` keeps the result."""
