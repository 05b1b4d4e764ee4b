"""Rules of KV groups in tokens, and their messages of the contract."""
