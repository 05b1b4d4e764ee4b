"""Remembers over restarts how much was written to the drive under the disk tier: a file in the tier's directory.

    {"start_bytes": 120000000000000, "written_bytes": 5000000000}

`start_bytes` is `disk.wear_start_bytes`. Where the settings say another one, counting begins anew: it has what was
written before. The file is written once a minute and at the end, so a daemon that is killed forgets its last minute.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from prefixd.base.long_work.steps import in_thread

log = logging.getLogger(__name__)

_NAME = "wear.json"
_EVERY_S = 60.0


class WearFile:
    """The file.

    Args:
        folder: the disk tier's directory.
        start_bytes: bytes that had been written to the drive when counting began.
        written_bytes: returns the bytes of blocks that this daemon has written.

    Attributes:
        before_bytes: bytes of blocks that daemons before this one have written since counting began.
    """

    def __init__(self, folder: Path, start_bytes: int, written_bytes: Callable[[], int]) -> None:
        self._file = folder / _NAME
        self._start_bytes = start_bytes
        self._written_bytes = written_bytes
        self._failing = False
        self.before_bytes = self._saved_bytes = self._read()

    async def run(self) -> None:
        """Saves once a minute, until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await in_thread(self.save)

    def save(self) -> None:
        """Writes the file if blocks were written since. A failure is logged, once until it succeeds again."""
        written_bytes = self.before_bytes + self._written_bytes()
        if written_bytes == self._saved_bytes:
            return
        new = self._file.with_suffix(".new")
        try:
            with new.open("w") as file:
                file.write(json.dumps({"start_bytes": self._start_bytes, "written_bytes": written_bytes}) + "\n")
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave an empty file of this name
            new.replace(self._file)
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written (%s): the wear of this run is forgotten", self._file, error.strerror)
            self._failing = True
            return
        self._saved_bytes, self._failing = written_bytes, False

    def _read(self) -> int:
        try:
            saved = json.loads(self._file.read_bytes())
            start_bytes, written_bytes = int(saved["start_bytes"]), int(saved["written_bytes"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s cannot be read (%s): the wear is counted from now on", self._file, error)
            return 0
        return max(written_bytes, 0) if start_bytes == self._start_bytes else 0
