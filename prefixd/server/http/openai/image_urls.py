"""Images in a chat: files inside of the request, as `data:` URLs. The daemon fetches nothing from elsewhere."""

from __future__ import annotations

import binascii

from prefixd.server.http.openai.sampling_fields import FieldError

_PIECE = 256 << 10  # characters, a multiple of 4: other threads run between two pieces
_SHOWN = 60


def image_file(url: str) -> bytes:
    """The file that a URL holds: `data:image/png;base64,iVBORw0...`. Raises FieldError for any other URL."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise FieldError(
            "messages",
            f"image_url.url is {url[:_SHOWN]!r}, and the daemon fetches nothing from elsewhere; send the file itself: "
            "data:image/png;base64,...",
        )
    if not head.endswith(";base64"):
        raise FieldError("messages", f"image_url.url begins with {head[:_SHOWN]!r}; send data:image/png;base64,...")
    file = bytearray()
    try:
        for at in range(0, len(data), _PIECE):
            file += binascii.a2b_base64(data[at : at + _PIECE], strict_mode=True)
    except ValueError as error:
        raise FieldError("messages", f"image_url.url is not valid base64 ({error})") from error
    return bytes(file)
