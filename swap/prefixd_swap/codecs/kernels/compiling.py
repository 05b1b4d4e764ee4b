"""How loops are compiled: once a machine where the result can be kept, without Python's lock while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.registry import cpu_target

from prefixd_swap.codecs.codec import cut_short

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

# numba would import the rest of its modules when it first compiles. It does so here, where the codecs are imported, so
# that a process that runs out of descriptors has either all of it or no codec (`registry.py`).
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()


def compiled(*, reorders: bool = False) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """A decorator: compiles a function at its first call, and keeps the code beside its file or in NUMBA_CACHE_DIR.

    Where neither can be written, each process compiles for itself. Floating point is computed as it is
    written, so that every machine makes the same bytes, unless `reorders` allows sums in another order. A function that
    cannot be compiled for want of descriptors raises MemoryError.
    """
    fast: set[str] | bool = {"reassoc", "nsz"} if reorders else False

    def compile_lazily(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        try:
            kernel: Any = numba.njit(function, nogil=True, fastmath=fast, cache=True)
        except RuntimeError:  # "no locator available": no folder can be written
            kernel = numba.njit(function, nogil=True, fastmath=fast)

        def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            try:
                return cast("_Result", kernel(*args, **kwargs))
            except OSError:  # numba has the code in memory before it writes it to a folder that is full or gone
                pass
            except Exception:
                if not cut_short.is_set():
                    raise
            try:
                return cast("_Result", kernel(*args, **kwargs))
            except Exception as error:
                cut_short.set()
                raise MemoryError(f"a codec cannot be compiled now: {error!r}") from error

        return call

    return compile_lazily
