"""Text from elsewhere, made fit for a terminal and for a log: it can neither move the cursor nor begin a line."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def shown(text: str, keep: str = "") -> str:
    r"""The text with every character that is not printable written as its escape, but for those in `keep`.

    `"\x1b[2Jmodel\n"` becomes `"\\x1b[2Jmodel\\n"`. What reverses the direction of writing is not printable either.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def cleaned(message: M) -> M:
    """A copy of a daemon's message with all its texts `shown`: names and errors that clients choose are among them."""
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
    """A map whose keys may be texts, and whose values are numbers."""
    found = dict(entries)
    entries.clear()
    entries.update({shown(key) if isinstance(key, str) else key: value for key, value in found.items()})


class LogFormatter(logging.Formatter):
    """A record takes one line, whatever names are in it; the lines of a traceback are indented behind it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        record.message = shown(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """The traceback."""
        return "\n".join(f"  {shown(line)}" for line in super().formatException(ei).split("\n"))
