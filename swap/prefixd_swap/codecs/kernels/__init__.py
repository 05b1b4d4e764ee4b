"""Loops over numbers that numba compiles. Importing a module of them imports numba: half a second."""
