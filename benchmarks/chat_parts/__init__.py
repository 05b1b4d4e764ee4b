"""The parts of the chat benchmark."""
