"""Prints answers: tables and transcripts for people, JSON for programs."""
