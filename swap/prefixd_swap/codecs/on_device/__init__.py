"""int8 tiles made on the device where the numbers lie, so that a bus moves half of the bytes. Unverified on a GPU.

Importing `int8_triton` needs Triton.
"""
