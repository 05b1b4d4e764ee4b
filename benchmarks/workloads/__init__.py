"""Workloads: what is asked (conversations, traces, chats), how it is asked, and the figures that come of it."""
