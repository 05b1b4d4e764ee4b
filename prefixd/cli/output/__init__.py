"""How answers look: tables and transcripts for people, JSON for programs."""
