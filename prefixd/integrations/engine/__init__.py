"""What the connector of any engine needs: the line to the daemon, look-ups, save pins, copies, counters.

Nothing here imports an engine. In the modules, *the engine's blocks* are those of its own paged KV cache, and *blocks*
are prefixd's, each made of several of them.
"""
