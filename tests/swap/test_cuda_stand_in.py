"""The CUDA half of the tests, run against the stand-in driver where there is no GPU, and what the stand-in
refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.kv.stand_in import stand_in_environment

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TESTS = HERE.parent
# The suites with a CUDA half, and how many tests that has at least: fewer would mean that tests have stopped taking the
# `device` fixture, and that CUDA is not tested any more. Each entry is a process, which imports torch.
SUITES = {
    "memory and copies": (
        [
            HERE / "vmem",
            *(
                HERE / f"vtensor/test_{name}.py"
                for name in ("failures", "manager", "mapping_ahead", "model", "own_memory", "vattention")
            ),
            HERE / "copies",
            TESTS / "integrations/engine/copying/test_block_transfers_on_cuda.py",
        ],
        285,
    ),
    "worker and server": (
        [
            TESTS / "worker/on_cuda",
            TESTS / "worker/memory/test_shared_frames.py",
            TESTS / "cache/tiers/test_tiers_on_cuda.py",
            TESTS / "server/generation/test_generate_on_cuda.py",
        ],
        48,
    ),
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiles the stand-in; returns the environment of a process whose CUDA driver it is."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler to build the stand-in driver with")
    return {**stand_in_environment(tmp_path_factory.mktemp("stand_in")), "PREFIXD_TEST_STAND_IN": "1"}


@pytest.mark.parametrize("room", SUITES)
def test_the_cuda_half_passes_against_the_stand_in(room: str, stand_in: dict[str, str], tmp_path: Path) -> None:
    suites, least = SUITES[room]
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not real_gpu", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *map(str, suites)]
    done = subprocess.run(command, env=stand_in, cwd=TESTS.parent, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    assert counts["tests"] >= least, output
    assert counts["skipped"] == counts["failures"] == counts["errors"] == 0, output


_RULES = """
import json, threading
from cuda.bindings import driver as cu

outcome = {}
def note(name, result):
    outcome[name] = result[0].name
    return result[1:]

def in_a_fresh_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

note("a call before cuInit", cu.cuDeviceGet(0))
cu.cuInit(0)
prop, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
for location in (prop.location, access.location):
    location.type, location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
SIZE = 2 << 20
note("create without a context", cu.cuMemCreate(SIZE, prop, 0))
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1])
reserve = lambda: note("reserve in a fresh thread", cu.cuMemAddressReserve(SIZE, 0, 0, 0))
in_a_fresh_thread(reserve)
note("create half a granule", cu.cuMemCreate(SIZE // 2, prop, 0))
note("reserve half a granule", cu.cuMemAddressReserve(SIZE // 2, 0, 0, 0))
(handle,) = note("create", cu.cuMemCreate(SIZE, prop, 0))
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
note("export what is not exportable", cu.cuMemExportToShareableHandle(handle, FD, 0))
base = int(cu.cuMemAddressReserve(4 * SIZE, 0, 0, 0)[1])
note("map with an offset", cu.cuMemMap(base, SIZE, SIZE, handle, 0))
note("map outside a reservation", cu.cuMemMap(base + 4 * SIZE, SIZE, 0, handle, 0))
note("map", cu.cuMemMap(base, SIZE, 0, handle, 0))
note("map over it", cu.cuMemMap(base, SIZE, 0, handle, 0))
note("map half a granule", cu.cuMemMap(base + SIZE, SIZE // 2, 0, handle, 0))
cu.cuMemMap(base + SIZE, SIZE, 0, handle, 0)
cu.cuMemMap(base + 3 * SIZE, SIZE, 0, handle, 0)
note("access over a hole", cu.cuMemSetAccess(base, 4 * SIZE, [access], 1))
note("unmap over a hole", cu.cuMemUnmap(base, 4 * SIZE))
note("unmap an unaligned range", cu.cuMemUnmap(base + 4096, SIZE))
note("unmap to the middle of a mapping", cu.cuMemUnmap(base, SIZE + SIZE // 2))
note("unmap a run that is not mapped", cu.cuMemUnmap(base + 2 * SIZE, SIZE))
note("unmap a run of two", cu.cuMemUnmap(base, 2 * SIZE))
note("unmap it again", cu.cuMemUnmap(base, 2 * SIZE))
note("map where a run was", cu.cuMemMap(base, SIZE, 0, handle, 0))
cu.cuMemUnmap(base + 3 * SIZE, SIZE)
stream = cu.cuStreamCreate(1)[1]
host = bytearray(SIZE)
import ctypes
host_at = ctypes.addressof(ctypes.c_char.from_buffer(host))
note("access to more than is mapped", cu.cuMemSetAccess(base, 2 * SIZE, [access], 1))
note("access", cu.cuMemSetAccess(base, SIZE, [access], 1))
note("unmap a part", cu.cuMemUnmap(base, SIZE // 2))
note("unmap too much", cu.cuMemUnmap(base, 2 * SIZE))
note("free a mapped range", cu.cuMemAddressFree(base, 4 * SIZE))
note("release", cu.cuMemRelease(handle))
note("release twice", cu.cuMemRelease(handle))
note("map after release", cu.cuMemMap(base + SIZE, SIZE, 0, handle, 0))
(second,) = note("create another", cu.cuMemCreate(SIZE, prop, 0))
note("release the first once more", cu.cuMemRelease(handle))
cu.cuMemRelease(second)
note("unregister what is not registered", cu.cuMemHostUnregister(host_at))
note("register", cu.cuMemHostRegister(host_at, SIZE, 1))
note("register a part again", cu.cuMemHostRegister(host_at + 4096, 4096, 1))
note("unregister a part", cu.cuMemHostUnregister(host_at + 4096))
note("unregister", cu.cuMemHostUnregister(host_at))
note("a wrong context", cu.cuCtxSetCurrent(cu.CUcontext(host_at)))
note("a device that is not there", cu.cuDeviceGet(1))
unused = cu.cuEventCreate(0)[1]
in_a_fresh_thread(lambda: note("destroy an event without a context", cu.cuEventDestroy(unused)))
in_a_fresh_thread(lambda: note("destroy a stream without a context", cu.cuStreamDestroy(stream)))
note("destroy an event", cu.cuEventDestroy(unused))
note("destroy it again", cu.cuEventDestroy(unused))
note("record it", cu.cuEventRecord(unused, stream))
note("a copy into host addresses", cu.cuMemcpyHtoDAsync(host_at, host_at, SIZE, stream))
cu.cuMemHostRegister(host_at, 4096, 1)
note("a copy that is registered in part", cu.cuMemcpyHtoDAsync(base, host_at, SIZE, stream))
cu.cuMemHostRegister(host_at + 4096, SIZE - 4096, 1)
note("a copy that is registered by two calls", cu.cuMemcpyHtoDAsync(base, host_at, SIZE, stream))
note("a copy", cu.cuMemcpyHtoDAsync(base, host_at + 4096, SIZE - 4096, stream))
event = cu.cuEventCreate(0)[1]
cu.cuEventRecord(event, stream)
note("asked at once", cu.cuEventQuery(event))
note("unmap under the copy", cu.cuMemUnmap(base, SIZE))
note("waiting for it", cu.cuStreamSynchronize(stream))
note("anything after that", cu.cuMemCreate(SIZE, prop, 0))
print(json.dumps(outcome))
"""


def test_the_stand_in_enforces_the_drivers_rules(stand_in: dict[str, str]) -> None:
    # The one copy of the script takes so long that what follows it comes in the middle of it.
    environment = {**stand_in, "PREFIXD_STAND_IN_COPY_US": "1000000"}
    done = subprocess.run([sys.executable, "-c", _RULES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = "CUDA_ERROR_INVALID_VALUE"
    assert json.loads(done.stdout) == {
        "a call before cuInit": "CUDA_ERROR_NOT_INITIALIZED",
        "create without a context": "CUDA_ERROR_INVALID_CONTEXT",
        "reserve in a fresh thread": "CUDA_ERROR_INVALID_CONTEXT",
        "create half a granule": wrong,
        "reserve half a granule": wrong,
        "create": "CUDA_SUCCESS",
        "export what is not exportable": wrong,
        "map with an offset": wrong,
        "map outside a reservation": wrong,
        "map": "CUDA_SUCCESS",
        "map over it": "CUDA_ERROR_ALREADY_MAPPED",
        "map half a granule": wrong,
        "access over a hole": wrong,
        "unmap over a hole": wrong,
        "unmap an unaligned range": wrong,
        "unmap to the middle of a mapping": wrong,
        "unmap a run that is not mapped": wrong,
        "unmap a run of two": "CUDA_SUCCESS",
        "unmap it again": wrong,
        "map where a run was": "CUDA_SUCCESS",
        "access to more than is mapped": wrong,
        "access": "CUDA_SUCCESS",
        "unmap a part": wrong,
        "unmap too much": wrong,
        "free a mapped range": wrong,
        "release": "CUDA_SUCCESS",
        "release twice": wrong,
        "map after release": wrong,
        "create another": "CUDA_SUCCESS",
        "release the first once more": wrong,
        "unregister what is not registered": "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "register": "CUDA_SUCCESS",
        "register a part again": "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "unregister a part": "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "unregister": "CUDA_SUCCESS",
        "a wrong context": "CUDA_ERROR_INVALID_CONTEXT",
        "a device that is not there": "CUDA_ERROR_INVALID_DEVICE",
        "destroy an event without a context": "CUDA_ERROR_INVALID_CONTEXT",
        "destroy a stream without a context": "CUDA_ERROR_INVALID_CONTEXT",
        "destroy an event": "CUDA_SUCCESS",
        "destroy it again": "CUDA_ERROR_INVALID_HANDLE",
        "record it": "CUDA_ERROR_INVALID_HANDLE",
        "a copy into host addresses": wrong,
        "a copy that is registered in part": wrong,
        "a copy that is registered by two calls": wrong,
        "a copy": "CUDA_SUCCESS",
        "asked at once": "CUDA_ERROR_NOT_READY",
        "unmap under the copy": "CUDA_SUCCESS",
        "waiting for it": "CUDA_ERROR_ILLEGAL_ADDRESS",
        "anything after that": "CUDA_ERROR_ILLEGAL_ADDRESS",
    }


_CAPACITY = """
import os, sys
from cuda.bindings import driver as cu

os.environ["PREFIXD_STAND_IN_MEMORY_BYTES"] = sys.argv[1]
cu.cuInit(0)
os.environ["PREFIXD_STAND_IN_MEMORY_BYTES"] = "1"  # read at cuInit only
prop = cu.CUmemAllocationProp()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
SIZE = 2 << 20
contexts = [cu.cuDevicePrimaryCtxRetain(device)[1] for device in range(2)]

def left(device):
    cu.cuCtxSetCurrent(contexts[device])
    return [int(value) for value in cu.cuMemGetInfo()[1:]]

cu.cuCtxSetCurrent(contexts[0])
one, two = (cu.cuMemCreate(SIZE, prop, 0)[1] for _ in range(2))
assert left(0) == [SIZE, 3 * SIZE] and left(1) == [3 * SIZE, 3 * SIZE]
assert cu.cuMemCreate(2 * SIZE, prop, 0)[0].name == "CUDA_ERROR_OUT_OF_MEMORY"
third = cu.cuMemCreate(SIZE, prop, 0)[1]
assert cu.cuMemCreate(SIZE, prop, 0)[0].name == "CUDA_ERROR_OUT_OF_MEMORY" and left(0)[0] == 0
base = int(cu.cuMemAddressReserve(SIZE, 0, 0, 0)[1])
cu.cuMemMap(base, SIZE, 0, one, 0)
cu.cuMemRelease(one)
assert left(0)[0] == 0, "a mapping keeps the memory"
cu.cuMemUnmap(base, SIZE)
assert left(0)[0] == SIZE
prop.location.id = 1
assert cu.cuMemCreate(SIZE, prop, 0)[0].name == "CUDA_SUCCESS" and left(1)[0] == 2 * SIZE
prop.location.id = 2
assert cu.cuMemCreate(SIZE, prop, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"

cu.cuCtxSetCurrent(contexts[0])
stream, event = cu.cuStreamCreate(1)[1], cu.cuEventCreate(0)[1]
cu.cuCtxPushCurrent(contexts[1])
other = cu.cuEventCreate(0)[1]
assert cu.cuEventRecord(event, stream)[0].name == "CUDA_SUCCESS", "the stream says the context"
assert cu.cuEventRecord(other, stream)[0].name == "CUDA_ERROR_INVALID_HANDLE"
assert cu.cuEventRecord(event, 0)[0].name == "CUDA_ERROR_INVALID_HANDLE", "the default stream is another's"
assert int(cu.cuCtxPopCurrent()[1]) == int(contexts[1])
assert cu.cuEventRecord(event, 0)[0].name == "CUDA_SUCCESS"
"""


def test_the_stand_in_has_the_memory_and_the_devices_it_was_told(stand_in: dict[str, str]) -> None:
    environment = {**stand_in, "PREFIXD_STAND_IN_DEVICES": "2"}
    command = [sys.executable, "-c", _CAPACITY, str(3 * (2 << 20))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
