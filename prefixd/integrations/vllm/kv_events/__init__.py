"""The KV events of blocks that the daemon keeps, in the stream of vLLM."""
