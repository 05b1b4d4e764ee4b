"""Workloads (conversations, traces, chats), the requests made of them, and their figures."""
