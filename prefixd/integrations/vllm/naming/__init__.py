"""What changes the KV that vLLM computes: the model's name, and token ids that stand for media."""
