"""Prints answers: tables and transcripts for people, JSON for programs; how far a long command is; the log."""
