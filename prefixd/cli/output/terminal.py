"""Makes text of clients safe for a terminal and for a log: it can neither move the cursor nor begin a line."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def shown(text: str, keep: str = "") -> str:
    r"""Returns the text with an escape for every character that is neither printable nor in `keep`.

    `"\x1b[2Jmodel\n"` becomes `"\\x1b[2Jmodel\\n"`. Characters that reverse the direction of writing count as not
    printable.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def cleaned(message: M) -> M:
    """Copies a daemon's message with all its texts `shown`: clients choose some of the names and errors in it."""
    copy = type(message)()
    copy.CopyFrom(message)
    _clean(copy)
    return copy


def _clean(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _clean_map(value)
        elif field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                _clean(each)
        elif field.type == field.TYPE_STRING:
            if field.is_repeated:
                value[:] = [shown(each) for each in value]
            else:
                setattr(message, field.name, shown(value))


def _clean_map(entries: Any) -> None:
    """Cleans the texts of a map; its other keys and values are numbers."""
    found = dict(entries)
    entries.clear()
    entries.update({_shown_text(key): _shown_text(value) for key, value in found.items()})


def _shown_text(value: Any) -> Any:
    return shown(value) if isinstance(value, str) else value


class LogFormatter(logging.Formatter):
    """Writes each record as one line, whatever names are in it; the lines of a traceback follow it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Formats the line with its message `shown`."""
        record.message = shown(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Formats the traceback with its lines `shown`."""
        return "\n".join(f"  {shown(line)}" for line in super().formatException(ei).split("\n"))
