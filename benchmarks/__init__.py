"""Measurements (`python -m benchmarks.NAME`) and checks that pass or fail (`python -m benchmarks.checks.NAME`).

Each is a function with its options declared above it, and its module's docstring is its help: `common/harness.py`
parses the options, writes the result with machine and commit, draws it, and ends with status 2 when a promise was
broken.

    common      the base, and what several rooms need: right bytes, daemons with a slow disk, a slow link, footprints
    workloads   what is asked (conversations, traces, chats), how it is asked, and the figures that come of it
    load        client processes that store, load and verify
    storage     slabs, tiers and flipped bits
    sharing     hosts that share a store
    engines     vLLM, SGLang and models for them
    kv          virtual tensors against block tables
    checks      the checks, and a room for the parts of each
    *_parts     the parts of one measurement
    results     what was measured
"""
