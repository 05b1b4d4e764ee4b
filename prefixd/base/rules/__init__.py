"""Rules of KV groups in tokens, and their messages in the contract."""
