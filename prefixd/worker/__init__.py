"""The inference worker: a process that runs the model on KV memory which the daemon owns.

It runs in a process of its own, started as ``python -m prefixd.worker --fd N --config JSON``. The daemon imports only
`prefixd.worker_protocol`, which does not import torch.
"""
