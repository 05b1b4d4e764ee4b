"""Encryption of blocks: keys, one object, and records of the index.

The remote tier (`stores/sealed.py`) and the disk tier share `derived_keys` and `aes_gcm`.
"""
