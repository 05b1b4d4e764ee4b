"""Reports indexes of the disk tier that were set aside, and their lost blocks, until an operator has recovered them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from prefixd.base.errors import ExhaustedError
from prefixd.base.long_work.steps import in_thread
from prefixd.cache import Troubles
from prefixd_swap import SetAside, SlabStore, StorageError

PART = "disk index"
"""The part that the trouble names. `prefixd doctor` fails while there is such a trouble."""
LOST = "in an index that was set aside"
"""The reason under which the blocks are counted as lost."""
_WATCH_S = 2.0

log = logging.getLogger(__name__)


class SetAsideCheck:
    """Reports indexes that were set aside, until `prefixd recover` or an operator has removed them.

    Args:
        store: the disk tier's store.
        troubles: gets the trouble.
        lost: numbers of lost blocks by reason; gets the reason `LOST` while there is such an index.
    """

    def __init__(self, store: SlabStore, troubles: Troubles, lost: Counter[str]) -> None:
        self._store = store
        self._troubles = troubles
        self._lost = lost

    def start(self) -> None:
        """Reports the indexes that exist at the daemon's start; may wait for the disk.

        Raises:
            StorageError: the directory cannot be read.
        """
        self._report(self._store.set_aside())

    async def watch(self) -> None:
        """Checks every two seconds, without end. While the directory cannot be read, the last report stays."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                found = await in_thread(self._store.set_aside)
            except (StorageError, ExhaustedError) as error:
                log.debug("the disk tier's directory could not be checked for indexes that were set aside: %s", error)
                continue
            self._report(found)

    def _report(self, found: list[SetAside]) -> None:
        if not found:
            self._lost.pop(LOST, None)
            self._troubles.end(PART)
            return
        counted = sum(each.blocks or 0 for each in found)
        self._lost[LOST] = counted
        unknown = " and an unknown number more" if any(each.blocks is None for each in found) else ""
        reasons = ", ".join(f"{each.path.name} ({each.reason or 'reason not known'})" for each in found)
        self._troubles.begin(
            PART,
            f"{counted:,} blocks{unknown} are lost with an index that was damaged or gone: "
            f"{reasons.replace('; ', ', ')}; stop the daemon soon and run `prefixd recover`, which brings back what "
            "can be read and was not overwritten since; or run `prefixd recover --discard`",
        )
