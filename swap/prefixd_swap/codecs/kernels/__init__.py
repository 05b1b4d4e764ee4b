"""Loops over numbers that numba compiles. Importing a module of them imports numba: half a second.

After a change to `floats.py`, also touch the modules that use it: numba looks at the file of a kernel alone to see
whether the code that it kept is stale.
"""
