"""Calling the CUDA driver: errors as exceptions, and the context that every thread needs.

`make gpu-check` runs it on a GPU; elsewhere the tests run it against a stand-in driver.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixd_swap.errors import DeviceError, OutOfMemoryError

STAND_IN_NAME = "prefixd stand-in"

_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "make the GPU tier smaller, or end what else uses this GPU (nvidia-smi)",
    "CUDA_ERROR_NO_DEVICE": "check CUDA_VISIBLE_DEVICES, or use the device cpu",
    "CUDA_ERROR_INVALID_DEVICE": "check the ordinal against CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_CONTEXT": "call CudaDevice.use_context() first in every thread",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU cannot share virtual memory between processes; use the device cpu",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "memory was unmapped under running work; the process has to be restarted",
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": "only addresses that register_host() pinned can be unregistered",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "each host range can be pinned once a process",
}


def ck(call: str, result: tuple[Any, ...]) -> Any:
    """Unpack what cuda-bindings returned from `call`: nothing, one value or a tuple of them.

    Raises OutOfMemoryError or DeviceError with the driver's error name and what to do about it.
    """
    error, *values = result
    if int(error) != 0:
        name = str(getattr(error, "name", error))
        remedy = _REMEDIES.get(name, f"see {call} in NVIDIA's driver API reference")
        kind = OutOfMemoryError if name == "CUDA_ERROR_OUT_OF_MEMORY" else DeviceError
        raise kind(f"{call} failed with {name}: {remedy}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def load_driver() -> Any:
    """The module `cuda.bindings.driver`, initialised. Raises DeviceError if the package or the driver is missing."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings cannot be imported ({error}); install it: pip install cuda-bindings"
        ) from error
    try:
        result = api.cuInit(0)
    except RuntimeError as error:  # cuda-bindings raises it when libcuda.so.1 is missing
        raise DeviceError(
            f"no CUDA driver on this machine ({error}); install NVIDIA's, or use the device cpu"
        ) from error
    ck("cuInit", result)
    return api


class CudaDevice:
    """One GPU and its primary context, the one that torch uses too.

    The context is retained for the life of the process: tensors may outlive every object of this package.
    """

    def __init__(self, ordinal: int) -> None:
        self.api = load_driver()
        self.ordinal = ordinal
        device = self.call("cuDeviceGet", ordinal)
        self.name = self.call("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
        kinds = self.api.CUdevice_attribute
        for need in (
            kinds.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ):
            if not self.call("cuDeviceGetAttribute", need, device):
                raise DeviceError(f"{self.name} lacks {need.name}, which the GPU tier needs; use the device cpu")
        self._context = self.call("cuDevicePrimaryCtxRetain", device)
        self.use_context()

    @property
    def tensor_device(self) -> str:
        """The device of torch tensors in this memory: "cpu" if the driver is the tests' stand-in."""
        return "cpu" if self.name == STAND_IN_NAME else f"cuda:{self.ordinal}"

    def use_context(self) -> None:
        """Make the primary context current in the calling thread; a new thread has none."""
        self.call("cuCtxSetCurrent", self._context)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make the primary context current in the calling thread, and restore the previous one afterwards.

        For threads of other packages, which may compute on another GPU.
        """
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver function `name`; returns and raises as `ck`."""
        return ck(name, getattr(self.api, name)(*arguments))

    def create_event(self) -> Any:
        """An event without timing whose waiters sleep instead of spinning."""
        flags = self.api.CUevent_flags
        return self.call("cuEventCreate", flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC)

    def destroy_event(self, event: Any) -> None:
        """Give an event back, in any thread; the driver destroys it once it has completed. Raises DeviceError."""
        with self.context():
            self.call("cuEventDestroy", event)

    def event_done(self, event: Any) -> bool:
        """Whether the work recorded in `event` has ended. Raises DeviceError if it failed."""
        result = self.api.cuEventQuery(event)
        if result[0] == self.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        ck("cuEventQuery", result)
        return True


def cuda_ordinal(device: str) -> int | None:
    """The ordinal of "cuda" (0) or "cuda:N"; None for "cpu". Raises DeviceError for another device."""
    kind, _, ordinal = device.partition(":")
    if device == "cpu":
        return None
    if kind == "cuda" and (not ordinal or ordinal.isdecimal()):
        return int(ordinal or 0)
    raise DeviceError(f'device {device!r} is not supported; use "cpu", "cuda" or "cuda:N"')


@functools.cache
def open_device(ordinal: int) -> CudaDevice:
    """The process's one `CudaDevice` for `ordinal`. Raises DeviceError."""
    return CudaDevice(ordinal)


def register_host(address: int, nbytes: int, ordinal: int = 0) -> None:
    """Pin host memory for every context of this process, so that copies run at full speed and overlap.

    Raises OutOfMemoryError when the system refuses to lock that much, DeviceError when the memory is pinned already.
    """
    device = open_device(ordinal)
    device.use_context()
    device.call("cuMemHostRegister", address, nbytes, device.api.CU_MEMHOSTREGISTER_PORTABLE)


def unregister_host(address: int, ordinal: int = 0) -> None:
    """Undo `register_host`. Raises DeviceError for an address that was not registered."""
    device = open_device(ordinal)
    device.use_context()
    device.call("cuMemHostUnregister", address)
