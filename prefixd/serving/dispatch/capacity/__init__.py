"""How many requests run at once, with which frames of the GPU tier, and which of them give way."""
