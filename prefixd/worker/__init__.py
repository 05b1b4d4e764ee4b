"""The inference worker: a process that runs the model on KV memory which the daemon owns.

The daemon imports `protocol` and `settings`, neither of which imports torch. The rest runs in the worker's
process, started as ``python -m prefixd.worker --fd N --config JSON``.
"""
