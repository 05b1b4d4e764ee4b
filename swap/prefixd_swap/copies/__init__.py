"""Copies between GPU and host memory, block by block and page by page."""
