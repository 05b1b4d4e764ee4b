"""Reads settings from flags, the environment and the file, and records the source of each value.

This module knows the settings by dotted name only (`cpu.bytes`); `prefixd.settings.settings` has types and limits, and
needs pydantic. This module needs the standard library only, so that a client finds the daemon's socket with it.

pydantic-settings merges such layers too, but it does not say which of them a value came from, ignores misspelt
variables, accepts a section as JSON in one variable (a second way to set the same value), and reads the process's
environment whenever a settings object is made. Working around this took more code than reading the layers.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prefixd.base.errors import ConfigError

ENV_PREFIX = "PREFIXD_"
FILE_NAME = "prefixd.toml"
SOCKET = "server.socket"
ANY_NAME = "NAME"
"""Stands in a setting's dotted name for the name of a section that the user chooses: tenants.NAME.cpu_most."""


def gather_layers(
    known: Collection[str],
    config_file: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the effective values as a nested dictionary, and the source of each by dotted name.

    Raises:
        ConfigError: a name is not in `known`, or the file cannot be read.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = config_file or find_config_file(environ)
    layers: list[tuple[str, Iterable[tuple[str, Any]]]] = [
        (str(path), _flatten(_read_toml(path)) if path else ()),
        *((variable, [setting]) for variable, setting in _read_environ(environ, known)),
        ("the command line", _flatten(overrides)),
    ]
    for source, settings in layers:
        for name, value in settings:
            if value == {}:  # an empty section counts if the user chose its name: it creates a tenant
                if any(other.startswith(f"{name.partition('.')[0]}.{ANY_NAME}.") for other in known):
                    values[name], sources[name] = value, source
                continue
            if not is_known(name, known):
                raise ConfigError(f"there is no setting {name} (set by {source}); {_remedy(name, known)}")
            values[name], sources[name] = value, source
    return _nest(values), sources


def find_socket(environ: Mapping[str, str]) -> Path:
    """Returns `server.socket` as a daemon with these variables has it, and with the file that they lead to.

    Raises:
        ConfigError: the file cannot be read, a variable is misspelt, or the value is no path.
    """
    file = find_config_file(environ)
    values = dict(_flatten(_read_toml(file)) if file else ())
    values.update(setting for _, setting in _read_environ(environ, [SOCKET]))
    value = values.get(SOCKET, default_socket())
    if not isinstance(value, str | Path):
        raise ConfigError(f"{SOCKET} = {value!r} (set by {file}) is no path; write it as a string")
    return Path(os.path.abspath(Path(value).expanduser()))


def default_socket() -> Path:
    """Returns `$XDG_RUNTIME_DIR/prefixd/prefixd.sock`, or `/tmp/prefixd-<uid>/prefixd.sock` without that variable."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "prefixd" if runtime else Path(f"/tmp/prefixd-{os.getuid()}")
    return folder / "prefixd.sock"


def is_known(name: str, known: Collection[str]) -> bool:
    """True if there is a setting of this dotted name."""
    first, _, rest = name.partition(".")
    _, dot, last = rest.partition(".")
    return name in known or bool(dot and f"{first}.{ANY_NAME}.{last}" in known)


def find_config_file(environ: Mapping[str, str]) -> Path | None:
    """Returns `prefixd.toml` in the working directory or in `$XDG_CONFIG_HOME/prefixd` (`~/.config/prefixd`)."""
    # Unlike pathlib's, this function leaves the path as it is for a user without a home directory, as in a container.
    home = Path(os.path.expanduser(environ.get("XDG_CONFIG_HOME") or "~/.config"))
    for path in (Path(FILE_NAME), home / "prefixd" / FILE_NAME):
        if path.is_file():
            return path
    return None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:  # broken TOML, or no UTF-8
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _read_environ(environ: Mapping[str, str], known: Collection[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (variable, (dotted name, value)) of each `PREFIXD_*` variable that is a setting and not empty.

    It ignores other PREFIXD_* variables (Kubernetes sets PREFIXD_SERVICE_HOST and PREFIXD_PORT for a service of that
    name), but refuses a variable with one underscore where two are needed.
    """
    sections = {name.partition(".")[0] for name in known}
    misspelt = {name.replace(".", "_"): name for name in known if "." in name}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or not value:
            continue
        rest = variable.removeprefix(ENV_PREFIX).lower()
        section, _, setting = rest.partition("__")
        if rest in known:
            yield variable, (rest, value)
        elif section in sections and setting:
            yield variable, (f"{section}.{setting}", value)
        elif rest in misspelt:
            right = ENV_PREFIX + misspelt[rest].replace(".", "__").upper()
            raise ConfigError(f"{variable} sets nothing; section and setting are joined by two underscores: {right}")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, setting = name.rpartition(".")
        target = nested
        for part in section.split(".") if section else ():
            target = target.setdefault(part, {})
        if value != {}:
            target[setting] = value
        elif name.count("."):
            target.setdefault(setting, {})
    return nested


_REMOVED = {
    "server.metrics_port": 'write server.metrics = "127.0.0.1:PORT" instead, the address of the operators\' HTTP port',
    "worker.feature_bytes": "images' embeddings lie in the tiers now, so remove it; worker.keep_embeddings = false "
    "computes them anew for each prompt",
}
"""Settings of earlier versions, and what to do instead."""


def _remedy(name: str, known: Collection[str]) -> str:
    inside = [other for other in known if other.startswith(f"{name}.")]
    if inside:
        return f"{name} is a section, with settings such as {inside[0]}"
    if name in _REMOVED:
        return _REMOVED[name]
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "`prefixd config show` lists them all"
