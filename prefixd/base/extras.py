"""What `pip install prefixd` leaves out: packages by the extra that brings them, and the line where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from prefixd.base.errors import ConfigError

_DAEMON = ("aiofiles", "grpc_health", "grpc_reflection", "lmdb", "msgspec", "prometheus_client", "pydantic", "zmq")
EXTRAS: dict[str, tuple[str, ...]] = {
    "daemon": _DAEMON,
    "worker": (*_DAEMON, "torch", "transformers", "tokenizers", "safetensors", "PIL", "cuda"),
    "remote": ("cryptography", "obstore"),
    "mooncake": ("mooncake",),
    "vllm": ("cuda", "pydantic"),
    "sglang": ("cuda", "pydantic"),
}
"""Top-level modules that an extra of pyproject.toml brings. The first extra that has a missing module is advised."""


class MissingExtraError(ConfigError):
    """A package that is not installed here is needed; the message has the command that installs it."""

    def __init__(self, what: str, module: str, extra: str) -> None:
        super().__init__(f"{what}: the package {module} is missing; pip install 'prefixd[{extra}]'")


def require(extra: str, what: str, *modules: str) -> None:
    """Raises MissingExtraError unless these modules of `extra`, by default all, are installed. Imports none of them.

    Args:
        extra: a name in `EXTRAS`.
        what: needs them, such as "prefixd serve" or "worker.model = /models/llama".
        modules: those of `extra` that are needed now.
    """
    for module in modules or EXTRAS[extra]:
        if find_spec(module) is None:
            raise MissingExtraError(what, module, extra)


def extra_of(module: str) -> str | None:
    """The extra to install for a module that could not be imported, such as "lmdb.cpython"; None: it is not ours."""
    root = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if root in modules), None)
