"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Strings at which texts end, made ready for the search. Shared by a request's sequences.

    Args:
        strings: not empty, each of at least one character.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.borders = tuple(_borders(string) for string in self.strings)


class StopSearch:
    """Looks for stop strings in one text, a character at a time (Knuth, Morris and Pratt's search).

    A part of the text that may be the beginning of a stop string is held back until it is decided:

    ```
        stop string     "\\n\\nUser:"
        text so far     "Yes.\\n\\nUs"
                         |out||held|
    ```

    The text ends before the stop string that is complete first; of several that end at the same character, before the
    longest.

    Args:
        stops: the strings.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.strings)  # of each string, how many characters the text so far ends with
        self._held = ""
        self.found = False
        """Whether a stop string is complete; nothing may follow."""

    def feed(self, text: str) -> str:
        """The text that can be shown now."""
        held = self._held + text
        for place, character in enumerate(text, len(self._held) + 1):
            longest = self._step(character)
            if longest:
                self.found, self._held = True, ""
                return held[: place - longest]
        shown = len(held) - max(self._matched)
        self._held = held[shown:]
        return held[:shown]

    def end(self) -> str:
        """The text has ended: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Length of the longest stop string that this character completes; 0 if none."""
        longest = 0
        for index, string in enumerate(self._stops.strings):
            matched, borders = self._matched[index], self._stops.borders[index]
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            matched += string[matched] == character
            self._matched[index] = matched
            if matched == len(string):
                longest = max(longest, matched)
        return longest


def _borders(string: str) -> list[int]:
    """For each beginning of a string, the length of its longest proper part that both begins and ends it."""
    borders = [0]
    for character in string[1:]:
        length = borders[-1]
        while length and string[length] != character:
            length = borders[length - 1]
        borders.append(length + (string[length] == character))
    return borders
