"""The remote tier: blocks in a store that hosts share, as they are or coded."""
