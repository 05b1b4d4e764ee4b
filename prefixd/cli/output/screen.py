"""Shows an output again and again: on a terminal in place of the one before, in a pipe one below the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Self

_HOME_AND_CLEAR = "\x1b[H\x1b[2J"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


class Screen:
    """The terminal's other screen while the block runs, so that what was there before comes back at its end."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> Self:
        if self._terminal:
            sys.stdout.write(_OTHER_SCREEN)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._terminal:
            sys.stdout.write(_FIRST_SCREEN)
            sys.stdout.flush()

    def show(self, output: Callable[[], None]) -> None:
        """Shows what `output` prints."""
        if self._terminal:
            sys.stdout.write(_HOME_AND_CLEAR)
        output()
        sys.stdout.flush()
