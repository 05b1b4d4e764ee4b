"""A daemon in its own process whose copies between GPU tier and CPU tier, both in host memory, have the rate of a link.

`python -m benchmarks.stand_ins.slow_copies RATE PARENT serve ...` is `prefixd serve ...` that ends with process PARENT
and copies RATE bytes a second. Waiting takes no processor, as a copy by a GPU takes none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from prefixd.server.startup import storage
from prefixd_swap.copies.address_columns import AddressColumns
from prefixd_swap.copies.copy_engine import HostCopyEngine
from prefixd_swap.copies.row_columns import RowColumns


class SlowCopies(HostCopyEngine):
    """Copies of host memory, one after the other at `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(threads=1)
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when all that was asked for has been copied

    async def copy_columns(self, columns: AddressColumns) -> None:
        await self._wait(int(columns.nbytes.sum()))
        await super().copy_columns(columns)

    async def copy_rows(self, copies: Sequence[RowColumns]) -> None:
        await self._wait(sum(len(each.to) * each.rows * each.width for each in copies))
        await super().copy_rows(copies)

    async def _wait(self, nbytes: int) -> None:
        self._free_s = max(time.monotonic(), self._free_s) + nbytes / self._bytes_per_s
        await asyncio.sleep(self._free_s - time.monotonic())


def main() -> None:
    """Runs the daemon."""
    from prefixd.cli import tethered

    rate = float(sys.argv.pop(1))
    vars(storage)["create_copy_engine"] = lambda device: SlowCopies(rate)  # where the daemon looks for it
    tethered.main()


if __name__ == "__main__":
    main()
