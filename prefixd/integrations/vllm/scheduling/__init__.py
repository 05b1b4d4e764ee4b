"""vLLM's scheduler with a waiting queue in the order of a policy."""
