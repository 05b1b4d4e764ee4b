"""The CUDA half of the tests, run against the stand-in driver where there is no GPU, and what the stand-in
refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
SOURCE = HERE / "stand_in" / "libcuda.c"
SUITES = sorted(
    [
        *HERE.glob("test_vmem_*.py"),
        *(HERE / f"test_{name}.py" for name in ("frames", "virtual_tensor", "copies")),
        HERE.parent / "cache" / "test_tiers_on_cuda.py",
        HERE.parent / "worker" / "test_engine_on_cuda.py",
        HERE.parent / "integrations" / "engine" / "test_transfers_on_cuda.py",
    ]
)
# Fewer would mean that tests have stopped taking the `device` fixture, and that CUDA's half is not tested any
# more.
LEAST_TESTS = 100


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiles the stand-in; returns the environment of a process whose CUDA driver it is."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in driver with")
    folder = tmp_path_factory.mktemp("stand_in")
    flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
    built = subprocess.run(
        [compiler, *flags, "-o", str(folder / "libcuda.so.1"), str(SOURCE)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PREFIXD_TEST_STAND_IN": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_the_cuda_half_passes_against_the_stand_in(stand_in: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    done = subprocess.run(
        [*command, *map(str, SUITES)], env=stand_in, cwd=HERE.parents[1], capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    assert counts["tests"] >= LEAST_TESTS, output
    assert counts["skipped"] == counts["failures"] == counts["errors"] == 0, output


_RULES = """
import json, threading
from cuda.bindings import driver as cu

outcome = {}
def note(name, result):
    outcome[name] = result[0].name
    return result[1:]

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
thread = threading.Thread(target=reserve)
thread.start()
thread.join()
note("create half a granule", cu.cuMemCreate(SIZE // 2, prop, 0))
(handle,) = note("create", cu.cuMemCreate(SIZE, prop, 0))
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
note("export what is not exportable", cu.cuMemExportToShareableHandle(handle, FD, 0))
base = int(cu.cuMemAddressReserve(4 * SIZE, 0, 0, 0)[1])
note("map with an offset", cu.cuMemMap(base, SIZE, SIZE, handle, 0))
note("map outside a reservation", cu.cuMemMap(base + 4 * SIZE, SIZE, 0, handle, 0))
note("map", cu.cuMemMap(base, SIZE, 0, handle, 0))
note("map over it", cu.cuMemMap(base, SIZE, 0, handle, 0))
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
note("unregister what is not registered", cu.cuMemHostUnregister(host_at))
note("a copy into host addresses", cu.cuMemcpyHtoDAsync(host_at, host_at, SIZE, stream))
note("a copy", cu.cuMemcpyHtoDAsync(base, host_at, SIZE, stream))
event = cu.cuEventCreate(0)[1]
cu.cuEventRecord(event, stream)
note("asked at once", cu.cuEventQuery(event))
note("unmap under the copy", cu.cuMemUnmap(base, SIZE))
note("waiting for it", cu.cuStreamSynchronize(stream))
note("anything after that", cu.cuMemCreate(SIZE, prop, 0))
print(json.dumps(outcome))
"""


def test_the_stand_in_enforces_the_drivers_rules(stand_in: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", _RULES], env=stand_in, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = "CUDA_ERROR_INVALID_VALUE"
    assert json.loads(done.stdout) == {
        "a call before cuInit": "CUDA_ERROR_NOT_INITIALIZED",
        "create without a context": "CUDA_ERROR_INVALID_CONTEXT",
        "reserve in a fresh thread": "CUDA_ERROR_INVALID_CONTEXT",
        "create half a granule": wrong,
        "create": "CUDA_SUCCESS",
        "export what is not exportable": wrong,
        "map with an offset": wrong,
        "map outside a reservation": wrong,
        "map": "CUDA_SUCCESS",
        "map over it": "CUDA_ERROR_ALREADY_MAPPED",
        "access to more than is mapped": wrong,
        "access": "CUDA_SUCCESS",
        "unmap a part": wrong,
        "unmap too much": wrong,
        "free a mapped range": wrong,
        "release": "CUDA_SUCCESS",
        "release twice": wrong,
        "unregister what is not registered": "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "a copy into host addresses": wrong,
        "a copy": "CUDA_SUCCESS",
        "asked at once": "CUDA_ERROR_NOT_READY",
        "unmap under the copy": "CUDA_SUCCESS",
        "waiting for it": "CUDA_ERROR_ILLEGAL_ADDRESS",
        "anything after that": "CUDA_ERROR_ILLEGAL_ADDRESS",
    }


_BENCHMARK = """
import json
from benchmarks.gpu_copy import measure_copies, measure_mapping
from prefixd_swap.copies import CudaCopyEngine
from prefixd_swap.vmem import create_memory

engine = CudaCopyEngine()
with create_memory("cuda") as memory:
    print(json.dumps(measure_mapping(memory, 4, 2) | measure_copies(memory, engine, 4, 2)))
engine.close()
"""


def test_the_gpu_benchmark_measures_something(stand_in: dict[str, str]) -> None:
    root = HERE.parents[1]
    environment = {**stand_in, "PYTHONPATH": os.pathsep.join([str(root), stand_in["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", _BENCHMARK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ways = [f"{way}_{how}_gbps" for way in ("h2d", "d2h") for how in ("one", "scattered", "run")]
    assert all(result[name] > 0 for name in [*ways, "create_us", "map_one_us", "map_in_a_run_us", "unmap_us"])
