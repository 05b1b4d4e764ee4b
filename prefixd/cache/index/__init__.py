"""The index of cached blocks: block keys, the key index, and the trie."""
