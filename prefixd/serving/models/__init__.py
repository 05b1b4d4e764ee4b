"""The models of a daemon, each with its worker process and its part of the GPU."""
