"""Workloads (conversations, traces, chats), and the requests made of them."""
