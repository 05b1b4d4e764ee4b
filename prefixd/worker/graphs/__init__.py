"""Passes as CUDA graphs: what a captured pass reads, and which pass a graph replays."""
