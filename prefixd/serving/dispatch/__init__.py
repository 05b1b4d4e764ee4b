"""The dispatcher: which waiting request runs next, and what is brought to the GPU for it."""
