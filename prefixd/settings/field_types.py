"""The types of settings: they parse values and refuse invalid ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from prefixd.base.errors import ConfigError
from prefixd.base.sizes import parse_room

# The socket that hands over the CPU tier's memory has the name of the daemon's socket and this suffix.
MEMORY_SOCKET_SUFFIX = "-memory"
# sun_path of sockaddr_un has 108 bytes, the last of which is a NUL.
LONGEST_SOCKET_PATH = 107 - len(MEMORY_SOCKET_SUFFIX)


def listed_numbers(value: object) -> object:
    """Splits a list of numbers from an environment variable or from --set: 1001,1002."""
    if isinstance(value, int):
        raise ValueError(f"write a list such as [{value}]")
    return value.replace(",", " ").split() if isinstance(value, str) else value


def listed_texts(value: object) -> object:
    """Splits a list of texts from an environment variable or from --set: /models/a,/models/b."""
    if not isinstance(value, str):
        return value
    if value.strip().startswith("["):
        raise ValueError("write the texts with commas between them, without brackets and quotes: /models/a,/models/b")
    return [text.strip() for text in value.split(",") if text.strip()]


def _make_absolute(value: Path) -> Path:
    return Path(os.path.abspath(value.expanduser()))


def _check_socket_path(value: Path) -> Path:
    value = _make_absolute(value)
    length = len(os.fsencode(value))
    if length > LONGEST_SOCKET_PATH:
        raise ValueError(f"the socket's path may have at most {LONGEST_SOCKET_PATH} bytes and has {length}; shorten it")
    return value


def _parse_size_or_auto(value: object) -> int | str:
    return value if value == "auto" else parse_room(value)


Bytes = Annotated[int, BeforeValidator(parse_room)]
BytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_parse_size_or_auto)]
AbsolutePath = Annotated[Path, AfterValidator(_make_absolute)]
SocketPath = Annotated[Path, AfterValidator(_check_socket_path)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
UserId = Annotated[int, Field(ge=0, le=(1 << 32) - 2)]


def default_data_dir() -> Path:
    """Returns `$XDG_DATA_HOME/prefixd`, or `~/.local/share/prefixd` without that variable.

    Raises ConfigError if the user has no home directory.
    """
    home = os.path.expanduser(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
    if home.startswith("~"):
        raise ConfigError(f"user {os.geteuid()} has no home directory; set data_dir (or HOME, or XDG_DATA_HOME)")
    return Path(home) / "prefixd"


class Section(BaseModel):
    """A table of the settings file. It refuses unknown names, and its values cannot change."""

    # The docstring below a field is its description: `config show --describe` prints it.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
