"""The daemon: gRPC services, the queue's dispatcher and the worker's supervisor."""
