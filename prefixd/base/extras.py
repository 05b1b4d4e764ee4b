"""Packages of the extras, which `pip install prefixd` does not install, and the error if one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from prefixd.base.errors import ConfigError

_DAEMON = (
    *("aiofiles", "grpc_health", "grpc_reflection", "lmdb", "msgspec", "prometheus_client", "pydantic", "starlette"),
    *("uvicorn", "zmq"),
)
EXTRAS: dict[str, tuple[str, ...]] = {
    "daemon": _DAEMON,
    "top": ("textual",),
    "worker": (*_DAEMON, "torch", "transformers", "tokenizers", "safetensors", "PIL", "cuda", "jinja2"),
    "codecs": ("numba", "zstandard"),
    "encryption": ("cryptography",),
    "remote": ("cryptography", "obstore"),
    "mooncake": ("mooncake",),
    "otel": ("opentelemetry",),
    "vllm": ("cuda", "pydantic"),
    "sglang": ("cuda", "pydantic"),
}
"""Top-level modules of each extra of pyproject.toml. The error for a missing module names the first extra with it."""


class MissingExtraError(ConfigError):
    """A needed package is not installed; the message has the command that installs it."""

    def __init__(self, needed_by: str, module: str, extra: str) -> None:
        super().__init__(f"{needed_by}: the package {module} is missing; pip install 'prefixd[{extra}]'")


def require(extra: str, needed_by: str, *modules: str) -> None:
    """Raises MissingExtraError unless these modules of `extra`, by default all, are installed. Imports none of them.

    Args:
        extra: a name in `EXTRAS`.
        needed_by: the command or setting that needs them: "prefixd serve", "worker.model = /models/llama".
        modules: modules of `extra` that are needed now, such as "opentelemetry.sdk".
    """
    for module in modules or EXTRAS[extra]:
        if not _is_installed(module):
            raise MissingExtraError(needed_by, module, extra)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def extra_of(module: str) -> str | None:
    """Returns the first extra that has a module, such as "lmdb.cpython"; None if no extra has it."""
    root = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if root in modules), None)
