"""prefixd inside other engines."""
