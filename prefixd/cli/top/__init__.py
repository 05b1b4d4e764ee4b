"""`prefixd top`: a daemon's figures in the terminal, live."""
