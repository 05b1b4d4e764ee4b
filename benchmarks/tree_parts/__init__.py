"""The parts of the tree search benchmark."""
