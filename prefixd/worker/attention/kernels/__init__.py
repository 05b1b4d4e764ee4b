"""What attention on a GPU calls: torch's flash attention, and kernels in Triton with the same computed in torch."""
