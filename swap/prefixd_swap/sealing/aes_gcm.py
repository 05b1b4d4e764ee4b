"""AES-256-GCM over memory that the caller gives: nothing is copied, and no memory is zeroed first.

`update_into` takes the pieces of one message where they lie, while the class AESGCM wants them in one piece with the
tag. From cryptography 50 on it releases the interpreter's lock for pieces above 64 KiB.

The package is imported when something is encrypted or decrypted: it is needed by no one else.
"""

from __future__ import annotations

from collections.abc import Iterable

Bytes = bytes | bytearray | memoryview

NONCE_BYTES = 12
TAG_BYTES = 16


def encrypt(key: bytes, nonce: bytes, clear: Iterable[Bytes], hidden: Iterable[tuple[Bytes, Bytes]]) -> bytes:
    """Encrypts one message and returns its tag.

    Args:
        key: 32 bytes.
        nonce: 12 bytes, never used before with this key.
        clear: pieces that are authenticated only.
        hidden: pieces that are encrypted, each with the memory for the result, which has as many bytes and may be the
            piece itself.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    encryption = Cipher(AES(key), GCM(nonce)).encryptor()
    for piece in clear:
        encryption.authenticate_additional_data(piece)
    for piece, into in hidden:
        encryption.update_into(piece, into)
    encryption.finalize()
    return encryption.tag


def decrypt(
    key: bytes, nonce: bytes, tag: bytes, clear: Iterable[Bytes], hidden: Iterable[tuple[Bytes, Bytes]]
) -> bool:
    """Decrypts a message of `encrypt`, likewise. False if it is not what was encrypted; the memory then has garbage."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    decryption = Cipher(AES(key), GCM(nonce, tag)).decryptor()
    for piece in clear:
        decryption.authenticate_additional_data(piece)
    for piece, into in hidden:
        decryption.update_into(piece, into)
    try:
        decryption.finalize()
    except InvalidTag:
        return False
    return True
