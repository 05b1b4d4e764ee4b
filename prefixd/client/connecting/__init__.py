"""Connects to a daemon: channel, session, credentials, and event loops in threads and after forks."""
