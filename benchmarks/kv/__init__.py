"""The worker's engine and its KV memory in one process, without a daemon: what `benchmarks.worker` measures."""
