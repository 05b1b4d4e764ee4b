"""From logits to tokens: sampling, beam search, speculation."""
