"""Files of images: bounded before they are decoded, whole, and known by their content."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from prefixd.base.errors import InvalidArgumentError
from prefixd.images.check_image import check_image
from prefixd.images.image_files import (
    MOST_CHUNKS,
    MOST_SCANS,
    MOST_SEGMENTS,
    ImageLimits,
    check_file,
    image_digest,
)
from prefixd.images.token_counts import FixedCount, GridCount, ImageProcessor, TileCount

LIMITS = ImageLimits(images=2, image_bytes=20_000, image_pixels=64 * 64)
PROCESSOR = ImageProcessor(FixedCount(5), bytes(32))


def encoded(width: int, height: int, kind: str = "PNG", *, seed: int = 0, **saving: object) -> bytes:
    """A file of noise."""
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(noise).save(file, kind, **saving)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_whole_files_are_taken_and_half_ones_are_not(kind: str) -> None:
    data = encoded(40, 24, kind)
    checked = check_image(data, 0, PROCESSOR, LIMITS)
    assert (checked.image.mode, checked.image.size, checked.tokens) == ("RGB", (40, 24), 5)
    with pytest.raises(InvalidArgumentError, match=r"images\[3\] \(\d+ bytes\) cannot be read.*send a whole file"):
        check_image(data[: len(data) // 2], 3, PROCESSOR, LIMITS)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read as PNG, JPEG or WebP"):
        check_image(encoded(8, 8, kind), 0, PROCESSOR, LIMITS)


def test_a_file_with_too_many_bytes_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"20001 bytes, and worker.image_bytes allows 20000; compress"):
        check_image(bytes(20_001), 0, PROCESSOR, LIMITS)


def test_a_small_file_of_a_large_image_is_refused_and_not_decoded() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 1_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"no image data") + chunk(b"IEND", b"")
    with pytest.raises(InvalidArgumentError, match=r"60000 x 1000 pixels, and worker.image_pixels allows 4096; make"):
        check_image(bomb, 0, PROCESSOR, LIMITS)


def test_a_refusal_names_the_setting_and_nothing_of_the_daemons_memory() -> None:
    """The library has a bound of its own, and words of its own for a file that it does not know."""
    file = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(file, "PNG")
    with pytest.raises(InvalidArgumentError, match=r"images\[2\] has too many pixels, .*worker.image_pixels allows"):
        check_image(file.getvalue(), 2, PROCESSOR, ImageLimits(1, 1 << 20, 1 << 20))
    with pytest.raises(InvalidArgumentError, match=r"images\[0\] \(0 bytes\).*it has another format; send a whole"):
        check_image(b"", 0, PROCESSOR, LIMITS)


def test_an_image_that_moves_is_refused() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green")]
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidArgumentError, match="has 2 frames; send a file with a single image"):
        check_image(file.getvalue(), 0, PROCESSOR, LIMITS)


def scanned(jpeg: bytes, scans: int) -> bytes:
    """A progressive JPEG with so many more scans, which change nothing: 12 bytes each."""
    table = b"\xff\xc4" + bytes([0, 20, 0x10, 1, *[0] * 15, 0xE0])  # one code, for 16,384 blocks without a change
    scan = b"\xff\xda" + bytes([0, 8, 1, 1, 0, 1, 63, 0]) + b"\0\1"
    return jpeg[:-2] + table + scan * scans + jpeg[-2:]


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan goes over all pixels, whether it changes any or not: 16 ms of 16 million pixels for a few bytes."""
    plain = encoded(40, 24, "JPEG", progressive=True)
    scans = plain.count(b"\xff\xda")
    assert 5 < scans < 20 and check_image(plain, 0, PROCESSOR, LIMITS).tokens == 5
    most = scanned(plain, MOST_SCANS - scans)
    assert check_image(most, 0, PROCESSOR, LIMITS).tokens == 5, "as many as may be"
    monkeypatch.setattr(Image, "open", None)
    for data in (scanned(plain, MOST_SCANS - scans + 1), scanned(plain, 500), scanned(encoded(40, 24, "JPEG"), 64)):
        with pytest.raises(InvalidArgumentError, match=r"images\[4\] is a JPEG with more than 64 scans.*save it again"):
            check_image(data, 4, PROCESSOR, LIMITS)


def test_files_in_many_pieces_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", None)
    jpeg, png = encoded(8, 8, "JPEG"), encoded(8, 8)
    limits = ImageLimits(1, 1 << 20, 64)
    with pytest.raises(InvalidArgumentError, match=r"images\[0\] is a JPEG with more than 1024 segments; save it"):
        check_image(jpeg[:2] + b"\xff\xfe\0\2" * MOST_SEGMENTS + jpeg[2:], 0, PROCESSOR, limits)
    empty = struct.pack(">I", 0) + b"teXt" + struct.pack(">I", zlib.crc32(b"teXt"))
    with pytest.raises(InvalidArgumentError, match=r"images\[0\] is a PNG with more than 16384 chunks; save it again"):
        check_image(png[:33] + empty * MOST_CHUNKS + png[33:], 0, PROCESSOR, limits)


@pytest.mark.parametrize("saving", [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"subsampling": 0}])
def test_metadata_that_looks_like_scans_is_none(saving: dict[str, object]) -> None:
    """Comments, thumbnails, and what stands behind the end of the image."""
    noisy = encoded(64, 64, "JPEG", quality=98, comment=b"\xff\xda" * 1000, **saving)
    data = noisy + b"\xff\xda" * 1000
    check_file(data, 0, LIMITS)
    assert check_image(data, 0, PROCESSOR, LIMITS).tokens == 5


def test_an_image_that_the_model_cannot_take_is_named() -> None:
    processor = ImageProcessor(GridCount(side=28, least_pixels=28 * 28, most_pixels=28 * 28 * 24), bytes(32))
    with pytest.raises(InvalidArgumentError, match=r"images\[1\] cannot be used: it has 1024 x 4 pixels"):
        check_image(encoded(1024, 4), 1, processor, LIMITS)


def test_an_image_that_lies_on_its_side_is_turned_before_it_is_counted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = TileCount(side=28, patches=4, most_tiles=9, resolutions=[(28, 84)])
    assert wide.tokens(16, 40) != wide.tokens(40, 16)
    processor = ImageProcessor(wide, bytes(32))
    assert check_image(encoded(16, 40, "JPEG"), 0, processor, LIMITS).tokens == wide.tokens(40, 16)
    assert check_image(encoded(16, 40, "JPEG", exif=exif), 0, processor, LIMITS).tokens == wide.tokens(16, 40)


def test_a_file_has_another_digest_with_another_processor() -> None:
    data = encoded(8, 8)
    one = image_digest(data, PROCESSOR)
    assert len(one) == 32 and one == image_digest(data, PROCESSOR)
    assert one != image_digest(data, ImageProcessor(FixedCount(5), b"\1" * 32))
    assert one != image_digest(encoded(8, 8, seed=1), PROCESSOR), "other noise"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(["", "PNG", "JPEG", "WEBP"]), st.integers(0, 300))
def test_any_bytes_are_taken_or_refused_in_one_line(junk: bytes, kind: str, place: int) -> None:
    data = junk
    if kind:
        whole = encoded(12, 12, kind)
        data = whole[: place % len(whole)] + junk + whole[place % len(whole) + len(junk) :]
    try:
        assert check_image(data, 0, PROCESSOR, LIMITS).tokens == 5
    except InvalidArgumentError as error:
        assert "\n" not in str(error) and "images[0]" in str(error)
