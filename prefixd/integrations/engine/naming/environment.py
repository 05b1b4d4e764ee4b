"""Environment variables of an engine that go into the name of its namespaces.

As with arguments (`ArgumentTable`), a variable that is set and missing from the table goes into the name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

NUMBERS = "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE HIPBLASLT_ALLOW_TF32"
"""Variables of libraries below every engine that change the numbers that are computed."""

_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://")


class EnvironmentTable:
    """Sorts an engine's environment variables. Names are separated by blanks; `A_*` stands for all variables that
    begin with `A_` and are not in the table themselves.

    Args:
        prefix: the beginning of the engine's own names: "VLLM_".
        in_name: names of variables whose values go into the name, by reason.
        harmless: names of variables that cannot change KV, by reason.
    """

    def __init__(self, prefix: str, *, in_name: Mapping[str, str], harmless: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._in_name = frozenset(NUMBERS.split()).union(*(names.split() for names in in_name.values()))
        self._harmless = frozenset[str]().union(*(names.split() for names in harmless.values()))
        assert not self._in_name & self._harmless, f"twice in the table: {sorted(self._in_name & self._harmless)}"

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    @property
    def names(self) -> frozenset[str]:
        """All names in the table."""
        return self._in_name | self._harmless

    def counted(self, environ: Mapping[str, str], registered: Iterable[str], log: logging.Logger) -> list[str]:
        """Names of the set variables that go into the namespaces' name. An engine reads the ones that it registers, and
        its plugins others with its prefix. Kubernetes sets variables with that prefix for a service of such a name;
        these are left out.

        Args:
            environ: all variables that are set, as `os.environ`.
            registered: names of the variables that the engine says that it reads.
            log: gets one line with the variables that the table lacks.
        """
        engine_reads = {*registered, *NUMBERS.split()}
        counted, unknown = [], []
        for name, value in sorted(environ.items()):
            of_kubernetes = _OF_KUBERNETES.search(name) or _ADDRESS_OF_KUBERNETES.match(value)
            if name not in engine_reads and (not name.startswith(self._prefix) or of_kubernetes):
                continue
            entry = self._find(name)
            if entry not in self._harmless:
                counted.append(name)
            if entry is None:
                unknown.append(name)
        if unknown:
            log.warning(
                "prefixd: whether these environment variables change KV is not known, so only engines with the same "
                "values share it: %s; unset those that the engine does not need",
                ", ".join(unknown),
            )
        return counted

    def _find(self, name: str) -> str | None:
        if name in self.names:
            return name
        families = [each for each in self.names if each.endswith("*") and name.startswith(each[:-1])]
        return max(families, key=len, default=None)
