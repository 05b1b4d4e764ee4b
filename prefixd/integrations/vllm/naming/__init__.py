"""Facts that change the KV that vLLM computes: they go into the model's name or into token ids that stand for media."""
