"""Copies of evenly spaced rows between host memory and a device: one call of the driver for all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.copies.pinning import pieces
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice

LONGEST_PITCH = (1 << 31) - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`rows` rows of `width` bytes, on the host every `host_pitch` bytes, on the device every `device_pitch`.

    A pitch is at least the width, and with several rows at most LONGEST_PITCH.
    """

    host: int
    device: int
    width: int
    rows: int
    host_pitch: int
    device_pitch: int

    def part(self, first: int, rows: int) -> Rows:
        """`rows` of these rows."""
        host, device = self.host + first * self.host_pitch, self.device + first * self.device_pitch
        return Rows(host, device, self.width, rows, self.host_pitch, self.device_pitch)


def evenly_spaced(addresses: npt.NDArray[np.int64], width: int) -> Iterator[tuple[int, int, int]]:
    """Splits n host addresses, ascending and at least `width` bytes apart, into as few rows with one pitch as a look
    ahead of one gives; yields (index of the first, number, pitch).

    Example: 0 10 20 50 80 with width 10 gives (0, 3, 10), (3, 2, 30).
    """
    steps = np.diff(addresses)
    changes = np.append(np.flatnonzero(steps[1:] != steps[:-1]) + 1, len(steps)).tolist()
    first, change = 0, 0
    while first < len(addresses):
        while change < len(changes) and changes[change] <= first:
            change += 1
        last = changes[change] if change < len(changes) else first  # index of the last address with this step
        pitch = int(steps[first]) if last > first else width
        if pitch > LONGEST_PITCH:
            last, pitch = first, width
        yield first, last - first + 1, pitch
        first = last + 1


class StridedCopies:
    """Submits copies of one direction to a stream. One thread uses it."""

    def __init__(self, cuda: CudaDevice, stream: Any, *, to_device: bool) -> None:
        self._cuda = cuda
        self._stream = stream
        self._to_device = to_device
        kinds = cuda.api.CUmemorytype
        self._call = cuda.api.CUDA_MEMCPY2D()
        self._call.srcMemoryType = kinds.CU_MEMORYTYPE_HOST if to_device else kinds.CU_MEMORYTYPE_DEVICE
        self._call.dstMemoryType = kinds.CU_MEMORYTYPE_DEVICE if to_device else kinds.CU_MEMORYTYPE_HOST

    def submit(self, rows: Rows) -> None:
        """Copies the rows; host memory that is registered in slices is cut at their borders. Raises DeviceError."""
        if rows.rows == 1 or rows.width == rows.host_pitch == rows.device_pitch:
            for offset, nbytes in pieces(rows.host, rows.rows * rows.width):
                host, device = rows.host + offset, rows.device + offset
                if self._to_device:
                    self._cuda.call("cuMemcpyHtoDAsync", device, host, nbytes, self._stream)
                else:
                    self._cuda.call("cuMemcpyDtoHAsync", host, device, nbytes, self._stream)
        elif len(pieces(rows.host, (rows.rows - 1) * rows.host_pitch + rows.width)) == 1:
            self._submit_rows(rows)
        else:
            half = rows.rows // 2
            self.submit(rows.part(0, half))
            self.submit(rows.part(half, rows.rows - half))

    def _submit_rows(self, rows: Rows) -> None:
        call = self._call
        call.WidthInBytes, call.Height = rows.width, rows.rows
        if self._to_device:
            call.srcHost, call.srcPitch, call.dstDevice, call.dstPitch = (
                *(rows.host, rows.host_pitch, rows.device, rows.device_pitch),
            )
        else:
            call.dstHost, call.dstPitch, call.srcDevice, call.srcPitch = (
                *(rows.host, rows.host_pitch, rows.device, rows.device_pitch),
            )
        self._cuda.call("cuMemcpy2DAsync", call, self._stream)
