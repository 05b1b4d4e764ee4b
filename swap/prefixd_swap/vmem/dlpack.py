"""Tensors over memory that torch did not allocate.

DLPack names the device type, so torch never asks the driver about the pointer: a view can cover addresses on which
nothing is mapped yet. It can also hold bfloat16, which the array interfaces of numpy and CUDA cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

from prefixd_swap.errors import DeviceError

_KDL_CPU, _KDL_CUDA = 1, 2
_KDL_INT, _KDL_UINT, _KDL_FLOAT, _KDL_BFLOAT = 0, 1, 2, 4
_TYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: _KDL_FLOAT,
    torch.float16: _KDL_FLOAT,
    torch.bfloat16: _KDL_BFLOAT,
    torch.uint8: _KDL_UINT,
    torch.int32: _KDL_INT,
    torch.int64: _KDL_INT,
}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, with its DLTensor written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor_at(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A tensor over `address`, `strides` in elements. It does not own the memory.

    Raises TypeError for an unknown dtype or device, DeviceError when torch cannot use CUDA.
    """
    if dtype not in _TYPE_CODES:
        raise TypeError(f"no view of {dtype}; supported are {', '.join(map(str, _TYPE_CODES))}")
    kind, _, ordinal = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise TypeError(f"no view on device {device}; supported are cpu and cuda")
    if kind == "cuda":
        if not torch.backends.cuda.is_built():
            raise DeviceError("this torch is a build without CUDA; install one with it, or use the device cpu")
        torch.cuda.init()
    ndim = len(shape)
    header = ctypes.sizeof(_ManagedTensor)
    # One block of malloc holds everything that the consumer reads, and free() itself is the deleter: it can run in any
    # thread and after the interpreter has ended, where a Python callback would crash.
    block = int(_libc.malloc(header + 16 * max(ndim, 1)))
    managed = _ManagedTensor.from_address(block)
    sizes = (ctypes.c_int64 * (2 * ndim)).from_address(block + header)
    sizes[:] = [*shape, *strides]
    managed.data = address
    managed.device = _Device(_KDL_CPU if kind == "cpu" else _KDL_CUDA, int(ordinal or 0))
    managed.ndim = ndim
    managed.dtype = _DataType(_TYPE_CODES[dtype], dtype.itemsize * 8, 1)
    managed.shape = block + header
    managed.strides = block + header + 8 * ndim
    managed.byte_offset = 0
    managed.manager = None
    managed.deleter = _FREE
    try:
        return from_dlpack(_new_capsule(block, b"dltensor", None))
    except (RuntimeError, BufferError):
        _libc.free(block)
        raise
