"""A scheduler for vLLM that keeps the waiting queue in the order of a policy."""
