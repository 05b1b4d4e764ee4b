"""Attention over the KV in virtual tensors or block tables, a file a kernel."""
