"""Copies the pages of SGLang's host pools from and to the daemon's arena.

A page lies in its pool in one or several buffers, which `get_page_buffer_meta` names; in the arena they follow each
other in the same order:

    page_first   K of the page at one place, V at another        arena  K V
    layer_first  K and V of each layer, far apart                arena  K0 V0 K1 V1 ...
    MLA          one buffer, or one a layer                      arena  C, or C0 C1 ...

Evenly spaced buffers of a page are one strided copy. Pools that cannot name their buffers (states in layer_first) are
copied through a page that SGLang makes. numpy makes all copies; it releases the GIL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefixd.integrations.engine.pages_by_key.engine_pages import Bytes, Check, PagesAt, PagesUnusable, WholePages

RUN_BYTES = 32 << 20
"""Neighbours are copied together up to this size, so that an expired lease is noticed in time."""

_WHOLE_PAGE_LAYOUTS = ("page_first_direct", "page_head")


class PoolPages(ABC):
    """The pages of one pool."""

    packing: str
    """How a page's bytes follow each other in the arena."""

    def __init__(self, pool: Any, page_bytes: int) -> None:
        self.pool = pool
        self.page_bytes = page_bytes
        """Bytes of a page; 0 for a pool without bytes of its own."""
        self.page_tokens = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1) or 1)

    @abstractmethod
    def at(self, host_indices: torch.Tensor, pages: int) -> PagesAt:
        """`pages` pages at SGLang's token indices, ready to be copied. Raises PagesUnusable."""

    def _starts(self, host_indices: torch.Tensor, pages: int) -> torch.Tensor:
        """The first token index of each page. Raises PagesUnusable unless the indices name whole pages of the pool."""
        tokens = self.page_tokens
        if getattr(host_indices, "ndim", 0) != 1:
            raise PagesUnusable("the host indices are no tensor of one dimension")
        if host_indices.numel() != pages * tokens:
            raise PagesUnusable(f"{host_indices.numel()} host indices for {pages} pages of {tokens} tokens")
        by_page = host_indices.detach().to("cpu", torch.int64).reshape(pages, tokens)
        starts = by_page[:, 0]
        if pages and not torch.equal(by_page, starts[:, None] + torch.arange(tokens)):
            raise PagesUnusable("the host indices of a page do not follow each other")
        if pages and int(starts.min()) < 0:
            raise PagesUnusable(f"host index {int(starts.min())} is negative")
        size = max(int(getattr(self.pool, name, 0) or 0) for name in ("size", "logical_size"))
        if pages and size and int(starts.max()) + tokens > size:
            raise PagesUnusable(f"host index {int(starts.max()) + tokens - 1} is outside a pool of {size} tokens")
        if getattr(self.pool, "layout", "") in _WHOLE_PAGE_LAYOUTS and bool((starts % tokens).any()):
            raise PagesUnusable(f"a page does not begin at a multiple of {tokens} tokens")
        return starts


def pages_of(pool: Any, *, flat: bool = False) -> PoolPages:
    """How the pages of a host pool are copied; `flat`: as the tensors that SGLang's `get_data_page` makes.

    Raises PagesUnusable for a pool that hands out neither buffers nor pages.
    """
    if not flat:
        tokens = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1) or 1)
        try:
            meta = pool.get_page_buffer_meta(torch.arange(tokens))
        except (AttributeError, NotImplementedError, ValueError):
            meta = ()  # it cannot name its buffers
        if meta is None or (meta and not meta[0]):
            return NoPages(pool)
        if meta:
            return BufferPages(pool, sum(int(size) for size in meta[1]), len(meta[0]))
    try:
        page = pool.get_dummy_flat_data_page()
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        raise PagesUnusable(f"{type(pool).__name__} hands out neither buffers nor pages: {error}") from error
    if page is None or not page.numel():
        return NoPages(pool)
    return FlatPages(pool, page.numel() * page.element_size())


class NoPages(PoolPages):
    """A pool with indices and without bytes, which other pools have."""

    packing = "none"

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, 0)

    def at(self, host_indices: torch.Tensor, pages: int) -> PagesAt:
        raise PagesUnusable(f"{type(self.pool).__name__} has no bytes of its own")


# -- pools that name their buffers ----------------------------------------------------------------------------------


class BufferPages(PoolPages):
    """Pages that are copied from and to the pool's own memory without a step between."""

    def __init__(self, pool: Any, page_bytes: int, buffers: int) -> None:
        super().__init__(pool, page_bytes)
        self._buffers = buffers
        self.packing = f"{buffers} buffers"
        self._memory = Memory(pool)

    def at(self, host_indices: torch.Tensor, pages: int) -> PagesAt:
        self._starts(host_indices, pages)
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices.detach().to("cpu"))
        if len(addresses) != pages * self._buffers or len(sizes) != len(addresses):
            raise PagesUnusable(
                f"{len(addresses)} buffers of {len(sizes)} sizes for {pages} pages of {self._buffers} buffers"
            )
        at = np.array(addresses, np.int64).reshape(pages, self._buffers)
        nbytes = np.array(sizes, np.int64).reshape(pages, self._buffers)
        if (nbytes < 0).any() or (nbytes.sum(axis=1) != self.page_bytes).any():
            raise PagesUnusable(f"a page has other than {self.page_bytes} bytes")
        return BuffersAt(self._memory, at, nbytes)


class Memory:
    """The tensors of a pool as bytes by address; keeps the tensors alive."""

    def __init__(self, pool: Any) -> None:
        arrays: dict[int, Bytes] = {}
        for tensor in _tensors([*vars(pool).values(), getattr(pool, "kv_buffer", None)]):
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
                continue
            array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            begin = int(array.ctypes.data)
            if begin not in arrays or arrays[begin].nbytes < array.nbytes:
                arrays[begin] = array
        self._arrays: list[Bytes] = []
        begins: list[int] = []
        ends: list[int] = []
        for begin in sorted(arrays):
            if not ends or begin + arrays[begin].nbytes > ends[-1]:
                self._arrays.append(arrays[begin])
                begins.append(begin)
                ends.append(begin + arrays[begin].nbytes)
        self._begins, self._ends = np.array(begins, np.int64), np.array(ends, np.int64)

    def check(self, addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> None:
        """Raises PagesUnusable unless each buffer lies in one of the tensors."""
        place = np.searchsorted(self._begins, addresses, side="right") - 1
        if (place < 0).any() or (addresses + nbytes > self._ends[place]).any():
            raise PagesUnusable("a page lies outside the pool's memory")

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes | None:
        """A view from `address`, which is in a tensor; None if it would reach beyond that tensor."""
        place = int(np.searchsorted(self._begins, address, side="right")) - 1
        try:
            return np.ndarray(shape, np.uint8, self._arrays[place].data, address - int(self._begins[place]), strides)
        except (TypeError, ValueError):
            return None


def _tensors(values: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, list | tuple):
            yield from _tensors(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _tensors(value.values(), depth - 1)


class BuffersAt(PagesAt):
    """Pages with a row of buffer addresses each."""

    def __init__(self, memory: Memory, addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> None:
        memory.check(addresses.reshape(-1), nbytes.reshape(-1))
        self._memory = memory
        self._addresses = addresses
        self._nbytes = nbytes

    def load(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        for ours, theirs in self._pairs(arena, places):
            check()
            np.copyto(ours, theirs)

    def save(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        for ours, theirs in self._pairs(arena, places):
            check()
            np.copyto(theirs, ours)

    def _pairs(self, arena: Bytes, places: Sequence[tuple[int, int]]) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs (the pool's bytes, the arena's bytes): one a page if its buffers are evenly spaced; else one a buffer,
        with neighbours joined."""
        run: list[int] | None = None  # address, offset in the arena, bytes
        for page, offset in places:
            row, sizes = self._addresses[page], self._nbytes[page]
            if (ours := self._spaced(row, sizes)) is not None:
                yield ours, arena[offset : offset + ours.size].reshape(ours.shape)
                continue
            for address, nbytes in zip(row.tolist(), sizes.tolist(), strict=True):
                if (
                    run is not None
                    and run[0] + run[2] == address
                    and run[1] + run[2] == offset
                    and run[2] + nbytes <= RUN_BYTES
                ):
                    run[2] += nbytes
                else:
                    if run is not None:
                        yield self._run(arena, *run)
                    run = [address, offset, nbytes]
                offset += nbytes
        if run is not None:
            yield self._run(arena, *run)

    def _run(self, arena: Bytes, address: int, offset: int, nbytes: int) -> tuple[Bytes, Bytes]:
        ours = self._memory.view(address, (nbytes,), (1,))
        if ours is None:  # two tensors that touch each other
            raise PagesUnusable("a page lies outside the pool's memory")
        return ours, arena[offset : offset + nbytes]

    def _spaced(self, row: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Bytes | None:
        regular = _spaced(row, sizes)
        return None if regular is None else self._memory.view(int(row[0]), *regular)


def _spaced(
    addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of a page whose buffers are evenly spaced, in one row or, as K and V by layer, in two."""
    count = len(addresses)
    if count < 2 or (nbytes != nbytes[0]).any():
        return None
    size = int(nbytes[0])
    steps = np.diff(addresses)
    if (steps == steps[0]).all() and steps[0] >= size:
        return (count, size), (int(steps[0]), 1)
    if count % 2 or count < 4:
        return None
    pairs = addresses.reshape(-1, 2)
    apart, step = int(pairs[0, 1] - pairs[0, 0]), int(pairs[1, 0] - pairs[0, 0])
    even = (pairs[:, 1] - pairs[:, 0] == apart).all() and (np.diff(pairs[:, 0]) == step).all()
    if not even or apart < size or step < size:
        return None
    return (count // 2, 2, size), (step, apart, 1)


# -- pools that hand out whole pages -----------------------------------------------------------------------------------


class FlatPages(PoolPages):
    """Pages that SGLang packs and unpacks itself, which takes one copy more."""

    packing = "flat"

    def at(self, host_indices: torch.Tensor, pages: int) -> PagesAt:
        return FlatAt(self.pool, self._starts(host_indices, pages).tolist(), self.page_bytes)


class FlatAt(PagesAt):
    """Pages at their first token indices, which SGLang packs and unpacks."""

    by_threads = False  # SGLang's own code copies, and may hold locks of the calling thread

    def __init__(self, pool: Any, starts: Sequence[int], page_bytes: int) -> None:
        self._pool = pool
        self._starts = starts
        self._page_bytes = page_bytes

    def load(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        for page, offset in places:
            tensor = self._pool.get_dummy_flat_data_page()
            check()
            np.copyto(_as_bytes(tensor, self._page_bytes), arena[offset : offset + self._page_bytes])
            self._pool.set_from_flat_data_page(self._starts[page], tensor)

    def save(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        for page, offset in places:
            data = _as_bytes(self._pool.get_data_page(self._starts[page], flat=True), self._page_bytes)
            check()
            np.copyto(arena[offset : offset + self._page_bytes], data)


class TensorsAt(WholePages):
    """Pages in tensors that SGLang packs and unpacks itself (its calls without interface v1)."""

    def __init__(self, tensors: Sequence[Any], page_bytes: int) -> None:
        if not all(tensor is not None and tensor.is_contiguous() for tensor in tensors):
            raise PagesUnusable("a page is no contiguous tensor")
        self._pages = [_as_bytes(tensor, page_bytes) for tensor in tensors]

    def bytes_of(self, page: int) -> Bytes:
        return self._pages[page]


def _as_bytes(tensor: Any, page_bytes: int) -> Bytes:
    """A page's tensor as bytes; a copy if the tensor is not contiguous."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        raise PagesUnusable("a page is no tensor in host memory")
    array: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if array.nbytes != page_bytes:
        raise PagesUnusable(f"a page has {array.nbytes} bytes where the pool's have {page_bytes}")
    return array
