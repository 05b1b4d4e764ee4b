"""Parts that every engine's connector shares: the link to the daemon, look-ups, the save queue, copies, counters.

Nothing here imports an engine. In the modules, *the engine's blocks* are those of its own paged KV cache, and *blocks*
are prefixd's, each made of several of them.
"""
