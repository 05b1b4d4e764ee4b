"""Which blocks exist: their keys, and the trie that orders them."""
