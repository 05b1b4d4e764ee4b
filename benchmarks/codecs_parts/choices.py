"""What the codecs' formats were chosen by: settings of zstd, the precision of scales, the size of int4's groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks.codecs_parts.made_up_kv import made_up_part, part_shape
from prefixd_swap.codecs.lossless import PARAMETERS
from prefixd_swap.codecs.quantized import K8V4Codec

_BYTES = 2 << 20
_LEVELS = (-1, 1, 3)
_MANTISSA_BITS = (2, 3, 4, 5, 7, 23)
_GROUPS = (16, 32, 64, 128)
_TIMES = 5
Float32s = npt.NDArray[np.float32]


def zstd_settings() -> list[dict[str, Any]]:
    """What zstd makes of the exponents of bfloat16: ratio, and GB/s of the plane a second of CPU time."""
    words = made_up_part(part_shape(_BYTES, 16, "bfloat16"), 0).view(np.uint16)
    plane = ((words >> 7) & 0xFF).astype(np.uint8)
    shares = np.bincount(plane, minlength=256) / plane.size
    entropy = -float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    compressors = {"codec": zstandard.ZstdCompressor(compression_params=PARAMETERS)}
    compressors |= {f"level {level}": zstandard.ZstdCompressor(level=level) for level in _LEVELS}
    decompressor = zstandard.ZstdDecompressor()
    rows: list[dict[str, Any]] = [{"zstd": "entropy", "ratio": round(8 / entropy, 3)}]
    for name, compressor in compressors.items():
        compressed = compressor.compress(plane.data)
        rows.append(
            {
                "zstd": name,
                "ratio": round(plane.size / len(compressed), 3),
                "encode_gbps": _gbps(partial(compressor.compress, plane.data), plane.size),
                "decode_gbps": _gbps(partial(decompressor.decompress, compressed), plane.size),
            }
        )
    return rows


def scale_precision() -> list[dict[str, Any]]:
    """Relative RMS errors of int8 keys and values whose scales have so many bits of mantissa, rounded up."""
    rows = []
    for tokens in (16, 64):
        keys, values = _numbers(tokens)
        of_keys, of_values = np.abs(keys).max(1, keepdims=True) / 127, np.abs(values).max(-1, keepdims=True) / 127
        for bits in _MANTISSA_BITS:
            errors = _error(keys, _rounded_up(of_keys, bits)), _error(values, _rounded_up(of_values, bits))
            rows.append(
                {"tokens": tokens, "mantissa_bits": bits, "keys_rms_error": errors[0], "values_rms_error": errors[1]}
            )
    return rows


def int4_groups() -> list[dict[str, Any]]:
    """Relative RMS error of int4 values with levels of their own for so many channels, and bytes over those of 16-bit
    numbers."""
    shape = part_shape(_BYTES, 16, "float32")
    part, rows = made_up_part(shape, 0), []
    exact, decoded = part.view(np.float32).reshape(shape.sizes)[:, :, 1], np.empty_like(part)
    for group in _GROUPS:
        codec = type("Grouped", (K8V4Codec,), {"int4_group": group})()
        codec.decode(codec.encode(part, shape), shape, decoded)
        apart = decoded.view(np.float32).reshape(shape.sizes)[:, :, 1] - exact
        error = float(np.sqrt((apart**2).mean() / (exact**2).mean()))
        rows.append(
            {"group": group, "values_rms_error": round(error, 5), "size": round((group / 2 + 2) / (2 * group), 4)}
        )
    return rows


def _numbers(tokens: int) -> tuple[Float32s, Float32s]:
    """Keys and values, [layer, token, head, channel] each."""
    shape = part_shape(_BYTES, tokens, "float32")
    numbers = made_up_part(shape, 0).view(np.float32).reshape(shape.sizes)
    return numbers[:, :, 0].swapaxes(0, 1), numbers[:, :, 1].swapaxes(0, 1)


def _rounded_up(scales: Float32s, bits: int) -> Float32s:
    unit = 1 << (23 - bits)
    words = scales.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded: Float32s = ((words + unit - 1) // unit * unit).astype(np.uint32).view(np.float32)
    return rounded


def _error(numbers: Float32s, scales: Float32s) -> float:
    apart = np.rint(numbers / scales) * scales - numbers
    return round(float(np.sqrt((apart**2).mean() / (numbers**2).mean())), 5)


def _gbps(work: Callable[[], object], nbytes: int) -> float:
    """The best of a few, after one that is not counted."""
    taken = []
    for _ in range(_TIMES + 1):
        begin = time.thread_time()
        work()
        taken.append(time.thread_time() - begin)
    return round(nbytes / min(taken[1:]) / 1e9, 3)
