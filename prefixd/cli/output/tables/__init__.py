"""Prints answers as tables, sentences and pictures, for people."""
