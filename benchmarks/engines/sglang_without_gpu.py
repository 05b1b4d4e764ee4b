"""Has modules of an unmodified sglang wheel import where there is no GPU: stand-ins for packages that need one, or that
nothing here calls."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

STAND_INS = (
    "compressed_tensors",
    "gguf",
    "llguidance",
    "sentencepiece",
    "sgl_kernel",
    "tiktoken",
    "torchvision",
    "triton",
    "tvm_ffi",
    "watchfiles",
    "zstandard",
)


def sglang(module: str) -> Any:
    """A module of SGLang's, as "srt.managers.cache_controller"."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kinds of quantization that a CPU has not
        return importlib.import_module(f"sglang.{module}")


def stand_in(name: str) -> Any:
    """One of `STAND_INS`, once `sglang` was called."""
    return importlib.import_module(name)


class _Kind(type):
    """A class of a stand-in: has every attribute, none of which is used."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    """A module with every class and every submodule, each of them callable as a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.5.0"
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = _Kind(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            made = _StandIn(f"{self.__name__}.{name}")
            made.__path__ = []
            made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
            sys.modules[made.__name__] = made
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> type:
        return object

    __ror__ = __or__


class _Finder:
    """Finds a stand-in where the package itself is not installed: it is asked last."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
