"""Messages between the daemon and its decode process: lines of JSON on a socket.

```
daemon                          decode process                  a process for each image
  <--- Described --------------- loads transformers
  ---- Job -------------------->  forks  -------------------->   reads the file from the shared memory, decodes it,
                                                                 writes its pixels there, and ends
  <--- Decoded or Refused ------  waits for it  <-------------
  ---- Drop ------------------->  kills it                       (its request has ended)
  <--- Killed ------------------
```

Each job gets one answer. The shared memory is a memory file (`PixelStore`) that daemon, decode process and worker map.
"""

from __future__ import annotations

import msgspec

from prefixd.images.token_counts import ImageProcessor


class InputArray(msgspec.Struct, frozen=True, array_like=True):
    """A small array that the model reads with the pixels. data: C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Pixels(msgspec.Struct, frozen=True, array_like=True):
    """An image in the model's format, except for the scale of its colours (`prepare_image`).

    offset: place of its bytes in the shared memory; uint8, C order. shape: shape of the array of these bytes.
    inputs: further arrays of transformers' image processor by name, such as `image_grid_thw`.
    """

    offset: int
    shape: tuple[int, ...]
    inputs: dict[str, InputArray]


class Described(msgspec.Struct, frozen=True, tag=True):
    """The image processor is loaded, or `processor` is None and `error` has the reason."""

    processor: ImageProcessor | None
    error: str = ""


class Job(msgspec.Struct, frozen=True, tag=True):
    """Decode an image. number: its index in the prompt. offset, nbytes: place and length of its file in the shared
    memory; its pixels overwrite the file."""

    id: int
    number: int
    offset: int
    nbytes: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Cancel a job. Ignored if it has ended."""

    id: int


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The pixels are in the shared memory. tokens: number of the image's placeholders in the prompt."""

    id: int
    tokens: int
    pixels: Pixels


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The file is not usable; `why` is the error text for its sender."""

    id: int
    why: str


class Killed(msgspec.Struct, frozen=True, tag=True):
    """The process of this image ended without an answer. overtime: it used up its processor time."""

    id: int
    overtime: bool
    status: int


Answer = Decoded | Refused | Killed

to_decoder = msgspec.json.Decoder(Job | Drop).decode
from_decoder = msgspec.json.Decoder(Described | Decoded | Refused | Killed).decode
encode = msgspec.json.Encoder().encode
