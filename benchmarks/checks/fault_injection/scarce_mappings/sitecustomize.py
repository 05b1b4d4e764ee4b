"""On a worker's PYTHONPATH: it has as many kernel mappings as the file says that SCARCE_MAPPINGS names, if it is there.

The kernel's own limit (vm.max_map_count) is one for the whole machine, so no test may lower it.
"""

import os
import sys
from pathlib import Path

if "prefixd.worker" in sys.orig_argv:
    from prefixd_swap.vmem.backends import mapping_budget

    class ScarceMappings(mapping_budget.MappingBudget):
        """A budget whose limit is in a file."""

        @property
        def limit(self) -> int:
            """The file's number, or what there was before."""
            try:
                return int(Path(os.environ["SCARCE_MAPPINGS"]).read_text())
            except FileNotFoundError:
                return self._enough

        @limit.setter
        def limit(self, enough: int) -> None:
            self._enough = enough

    budget = mapping_budget.PROCESS_MAPPINGS
    enough = budget.__dict__.pop("limit")
    budget.__class__ = ScarceMappings
    budget.limit = enough
