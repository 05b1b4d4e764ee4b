"""SGLang's HiCache with prefixd and with its own file backend: GB/s, and bytes that change on disk.

Runs SGLang's real HiCacheController (unmodified wheel, on the CPU) with prefixd's backend and with SGLang's own file
backend, which keeps its files beside the daemon's. Each round saves a prompt that neither has seen and loads it again,
through one and then the other, in alternating order; all bytes are compared.
A load is timed from when SGLang knows what is stored; that question is lookup_ms. The daemon has a disk tier and
begins to write to it at once; the file backend leaves its files to the kernel. Before loading, both have written
everything; both then have it in memory. Figures are medians over the rounds, after one to warm
up.

Then bits are flipped in what both have on disk: in the file backend's files, and in the slab files of a daemon that is
started again, so that it reads them. served_wrong counts pages that a controller took as loaded with a wrong byte.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import option, seed
from benchmarks.storage.bit_flips import StoredBlocks
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

if TYPE_CHECKING:
    import torch

    from benchmarks.engines.sglang_controller import Controller

BACKENDS = ("prefixd", "file")
LAYOUTS = ("page_first", "layer_first")
_LEAST = 2.0
_FLIP_PAGES = 4  # of a prompt, of which one is hit
_PAGE_TOKENS = 64
_DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@dataclass(slots=True)
class Times:
    """Seconds of each round, by backend."""

    save: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BACKENDS})
    lookup: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BACKENDS})
    load: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BACKENDS})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A prompt that came: host indices, None where nothing of it is there; seconds to ask for it, and to bring it."""

    indices: torch.Tensor | None
    pages: int
    lookup_s: float
    elapsed_s: float


class Bench:
    """A host pool, and a controller a backend on it."""

    def __init__(self, layout: str, pages: int, prompts: int, layers: int, address: str, files: Path) -> None:
        from benchmarks.engines.sglang_controller import MODULE, Controller, Shape, host_pool

        self.shape = Shape(
            layout=layout,
            allocator="shm",
            page_tokens=_PAGE_TOKENS,
            layers=layers,
            heads=4,
            head_dim=128,
            pages=2 * pages * prompts + 1,
        )
        self.pool = host_pool(self.shape)
        os.environ[_DIRECTORY] = str(files)
        self._files = files
        # The link's limit is not what is measured.
        extra = {**MODULE, "interface_v1": 1, "allocator": "shm", "prefixd": {"address": address, "timeout_s": 30.0}}
        self.controllers: dict[str, Controller] = {
            "prefixd": Controller(self.pool, extra=extra, model="benchmark"),
            "file": Controller(self.pool, "file", model="benchmark"),
        }

    def close(self) -> None:
        for controller in self.controllers.values():
            controller.close()
        self.pool.destroy()

    def clear(self) -> None:
        for controller in self.controllers.values():
            if not controller.it.storage_backend.clear():
                raise harness.BenchmarkError("a backend could not be cleared")

    def save(self, name: str, prompt: Sequence[int], indices: torch.Tensor) -> float:
        """Seconds that saving a prompt took."""
        begin = time.perf_counter()
        tokens = self.controllers[name].backup(prompt, indices)
        elapsed_s = time.perf_counter() - begin
        if tokens != len(prompt):
            raise harness.BenchmarkError(f"{name} saved {tokens} of {len(prompt)} tokens")
        return elapsed_s

    def load(self, name: str, prompt: Sequence[int]) -> Loaded:
        controller = self.controllers[name]
        begin = time.perf_counter()
        operation = controller.hits(prompt)
        lookup_s = time.perf_counter() - begin
        if not operation.storage_hit_count:
            return Loaded(None, 0, lookup_s, 0.0)
        controller.make_room(operation)
        begin = time.perf_counter()
        controller.it.prefetch_buffer.put(operation)
        tokens = controller.fetched()
        return Loaded(operation.host_indices, tokens // _PAGE_TOKENS, lookup_s, time.perf_counter() - begin)

    def wrong(self, saved: torch.Tensor, loaded: torch.Tensor, pages: int) -> int:
        """How many of the first pages are not the same."""
        import torch

        def page(indices: torch.Tensor, number: int) -> torch.Tensor:
            data: torch.Tensor = self.pool.get_data_page(int(indices[number * _PAGE_TOKENS]))
            return data.view(torch.uint8)

        return sum(not torch.equal(page(saved, number), page(loaded, number)) for number in range(pages))


def measure_speed(
    folder: Path, layout: str, pages: int, layers: int, rounds: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Saves and loads prompts of `pages` pages through both backends, in turns."""
    with ExitStack() as stack:
        nbytes = pages * layers * 4 * 128 * 4 * _PAGE_TOKENS
        settings = {"cpu.bytes": 2 * nbytes + (64 << 20), "disk.bytes": 4 * nbytes + (64 << 20)}
        daemon = stack.enter_context(DaemonProcess(settings, directory=folder / f"daemon {layout}"))
        bench = Bench(layout, pages, 1, layers, daemon.address, folder / f"files {layout}")
        stack.callback(bench.close)
        saved = bench.controllers["prefixd"].random_pages(pages, seed=0)
        times = Times()
        for number in range(rounds + 1):
            prompt = list(range(number * 1_000_000, number * 1_000_000 + pages * _PAGE_TOKENS))
            for name in BACKENDS if number % 2 else reversed(BACKENDS):
                times.save[name].append(bench.save(name, prompt, saved))
            _settle(daemon, folder / f"files {layout}")
            for name in BACKENDS if number % 2 else reversed(BACKENDS):
                loaded = bench.load(name, prompt)
                times.lookup[name].append(loaded.lookup_s)
                times.load[name].append(loaded.elapsed_s)
                if loaded.indices is None or loaded.pages != pages or bench.wrong(saved, loaded.indices, pages):
                    raise harness.BenchmarkError(f"{name}: the pages loaded are not the pages saved")
                bench.pool.free(loaded.indices)
            bench.clear()
            step()
        assert nbytes == pages * bench.shape.page_bytes
    result: dict[str, Any] = {"page_bytes": bench.shape.page_bytes}
    for way, seconds in (("save", times.save), ("load", times.load)):
        gbps = {name: nbytes / float(np.median(seconds[name][1:])) / 1e9 for name in BACKENDS}
        result |= {f"{name}_{way}_gbps": round(gbps[name], 3) for name in BACKENDS}
        times_file = np.array(seconds["file"][1:]) / np.array(seconds["prefixd"][1:])
        result[f"{way}_times_file"] = round(float(np.median(times_file)), 2)
    result |= {f"{name}_lookup_ms": round(1e3 * float(np.median(times.lookup[name][1:])), 2) for name in BACKENDS}
    return result


def _settle(daemon: DaemonProcess, files: Path) -> None:
    """Has both write to disk what they have not written yet, so that neither does while the other is timed."""
    with Client(daemon.address) as client:
        client.flush()
    for file in files.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def measure_flips(folder: Path, flips: int, seed: int, step: Callable[[], None]) -> dict[str, Any]:
    """Flips a bit in `flips` pages of each backend, and loads them."""
    rng = random.Random(f"sglang {seed}")
    disk_bytes = 512 << 20
    daemon = DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": disk_bytes}, directory=folder / "daemon flips")
    files = folder / "files flips"
    result: dict[str, Any] = {"flips": flips}
    with ExitStack() as stack:
        stack.enter_context(daemon)
        bench = Bench("page_first", _FLIP_PAGES, flips, 1, daemon.address, files)
        stack.callback(bench.close)
        controller = bench.controllers["prefixd"]
        prompts = []
        for number in range(flips):
            tokens = range(number * 1_000_000, number * 1_000_000 + _FLIP_PAGES * _PAGE_TOKENS)
            prompts.append((list(tokens), controller.random_pages(_FLIP_PAGES, seed=number)))
            for name in BACKENDS:
                bench.save(name, *prompts[-1])
        with Client(daemon.address) as client:
            client.flush()
        daemon.stop()
        _flip_files(files, bench, [prompt for prompt, _ in prompts], rng)
        _flip_slabs(folder / "daemon flips", disk_bytes, flips, rng)
        daemon.start()
        deadline = time.monotonic() + 30
        while not any(controller.hits(prompt).storage_hit_count for prompt, _ in prompts):  # a first page may be hit
            if time.monotonic() > deadline:
                raise harness.BenchmarkError("the controller does not find the daemon after its restart")
            time.sleep(0.05)
        for name in BACKENDS:
            served = wrong = 0
            for prompt, saved in prompts:
                loaded = bench.load(name, prompt)
                if (
                    loaded.indices is not None
                ):  # else its first page was hit, and found to be wrong when it was looked up
                    served += loaded.pages
                    wrong += bench.wrong(saved, loaded.indices, loaded.pages)
                    bench.pool.free(loaded.indices)
                step()
            result |= {f"{name}_served_pages": served, f"{name}_served_wrong": wrong}
        with Client(daemon.address) as client:
            result["integrity_violations"] = list(client.check_integrity().violations)
    return result


def _flip_files(files: Path, bench: Bench, prompts: Sequence[Sequence[int]], rng: random.Random) -> None:
    """One bit in the file of one page of each prompt."""
    for prompt in prompts:
        key = rng.choice(bench.controllers["file"].keys(prompt))
        (file,) = files.glob(f"{key}*.bin")
        _flip(file, rng.randrange(file.stat().st_size), rng)


def _flip_slabs(folder: Path, disk_bytes: int, flips: int, rng: random.Random) -> None:
    """One bit in one page of each prompt."""
    stored = StoredBlocks(next(folder.rglob("slabs")).parent, disk_bytes)
    hit: set[str] = set()
    blocks = sorted(stored.blocks.values(), key=lambda block: block.key)
    rng.shuffle(blocks)
    count = 0
    for block in blocks:
        if block.key not in hit:
            hit.update(stored.relatives(block))
            place = rng.choice(block.places)
            _flip(place.file, place.offset + rng.randrange(place.nbytes), rng)
            count += 1
    if count != flips:
        raise harness.BenchmarkError(f"{count} prompts are on disk where {flips} were saved")


def _flip(file: Path, offset: int, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
        os.fsync(opened.fileno())


def measure(pages: int, layers: int, rounds: int, flips: int, seed: int) -> dict[str, Any]:
    """Everything; `broken` says what was promised and does not hold."""
    with _folder() as name, harness.progress("rounds", len(LAYOUTS) * (rounds + 1) + len(BACKENDS) * flips) as step:
        folder = Path(name)
        result: dict[str, Any] = {"pages": pages, "rounds": rounds, "seed": seed}
        result["layouts"] = {layout: measure_speed(folder, layout, pages, layers, rounds, step) for layout in LAYOUTS}
        result |= measure_flips(folder, flips, seed, step)
    result["broken"] = [
        f"{layout}: {way} at {figures[f'{way}_times_file']} times the file backend's speed, less than {_LEAST:g}"
        for layout, figures in result["layouts"].items()
        for way in ("save", "load")
        if figures[f"{way}_times_file"] < _LEAST
    ]
    if result["prefixd_served_wrong"] or result["integrity_violations"]:
        result["broken"].append(f"{result['prefixd_served_wrong']} wrong pages, {result['integrity_violations']}")
    return result


def _folder() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="prefixd-sglang-")


@harness.benchmark(
    "sglang",
    __doc__,
    option("--pages", 128, "pages of a prompt"),
    option("--layers", 16, "layers: 128 KiB of a page each"),
    option("--rounds", 15, "rounds to time"),
    option("--flips", 200, "pages to damage, of each backend"),
    seed("of what is flipped where"),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it. Raises BenchmarkError without SGLang."""
    if find_spec("sglang") is None:
        raise harness.BenchmarkError(
            f"SGLang is not installed in {sys.executable}; run `make test-sglang` once, then .venv-sglang/bin/python"
        )
    result = measure(options.pages, options.layers, options.rounds, options.flips, options.seed)

    return harness.Outcome(result, result["broken"])


if __name__ == "__main__":
    harness.run(main)
