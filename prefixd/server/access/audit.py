"""The audit log: a line of JSON for each caller that is let in or refused and for each operator's action.

    {"time": "2026-03-01T09:12:44.120Z", "event": "refused", "tenant": "acme", "role": "client", "caller": "engine-3",
     "door": "tcp", "pid": 0, "what": "/prefixd.v1.Admin/Evict", "why": "the role admin is needed"}

docs/operations/security.md describes the fields. No line has token ids, salts or secrets. A thread writes the lines in
order; if the disk is slower than callers are, lines are left out and counted in the next line (`lost`). SIGHUP opens
the file again, so that it can be renamed away.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import stat
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.server.access.identities import Caller
from prefixd.server.access.socket_access import check_folder

log = logging.getLogger(__name__)

_MOST_WAITING = 10_000
_MOST_KNOWN = 4096
_AGAIN_S = 3600.0
"""Seconds after which a caller that is let in again gets another line."""
_LONGEST_TEXT = 512
_CLOSE_S = 5.0


class AuditLog:
    """Appends lines to a file; without a file, its methods do nothing.

    Args:
        path: the file, created with mode 0600; None: no log.

    Raises:
        ConfigError: the file cannot be opened, another user can put another file in its place, or the thread that
            writes it cannot be started.
    """

    def __init__(self, path: Path | None) -> None:
        self.enabled = path is not None
        """True if there is a file."""
        self._path = path
        self._known: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._lost = 0
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._reopen = threading.Event()
        self._thread: threading.Thread | None = None
        if path is None:
            return
        self._file = _open(path)
        self._thread = threading.Thread(target=self._write, name="prefixd-audit", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._file)
            raise ConfigError(f"server.audit_log = {path}: no thread to write it ({error}); raise ulimit -u") from error

    def log_let_in(self, caller: Caller) -> None:
        """Logs that a caller was let in, once an hour for each caller and door."""
        if self._thread is None:
            return
        identity, now_s = (caller.tenant.name, caller.name, caller.door), time.monotonic()
        logged_s = self._known.get(identity)
        if logged_s is not None and now_s - logged_s < _AGAIN_S:
            return
        self._known[identity] = now_s
        self._known.move_to_end(identity)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self.log_event("let in", caller)

    def log_refused(self, caller: Caller | None, what: str, why: str, *, door: str = "", peer: str = "") -> None:
        """Logs that a call was refused. For an unknown caller, `door` and `peer` say where the call came from."""
        self.log_event("refused", caller, door=door, peer=peer, what=what, why=why)

    def log_event(self, event: str, caller: Caller | None, **fields: str | float | None) -> None:
        """Logs an event, for example "evicted"; `fields` are further fields of the line. Never waits."""
        if self._thread is None:
            return
        line: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "event": event,
        }
        if caller is not None:
            line |= {
                "tenant": caller.tenant.name,
                "role": caller.role,
                "caller": caller.name,
                "door": caller.door,
                "pid": caller.pid,
            }
        line |= {
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in fields.items()
            if value != ""
        }
        if self._lost:
            line["lost"] = self._lost
        try:
            self._lines.put_nowait(json.dumps(line))
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def reopen(self) -> None:
        """Opens the path again before the next line is written: a new file, if the old one was renamed."""
        self._reopen.set()

    def close(self) -> None:
        """Writes the waiting lines and closes the file. If the disk does not answer for 5 s, lines are lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        end_s = time.monotonic() + _CLOSE_S
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
        thread.join(max(0.0, end_s - time.monotonic()))
        if thread.is_alive():
            log.error(
                "server.audit_log = %s does not take lines: %d and more are lost", self._path, self._lines.qsize()
            )
            return
        os.close(self._file)

    def _write(self) -> None:
        failed = False
        while (line := self._lines.get()) is not None:
            try:
                if self._reopen.is_set() and self._path is not None:
                    self._reopen.clear()
                    self._write_to_new_file(self._path)
                os.write(self._file, line.encode() + b"\n")
                failed = False
            except OSError as error:
                if not failed:
                    log.error("server.audit_log = %s cannot be written: %s", self._path, error)
                failed = True

    def _write_to_new_file(self, path: Path) -> None:
        try:
            fresh = _open(path)
        except ConfigError as error:
            log.error("%s; the audit log goes on in the old file", error)
            return
        self._file, old = fresh, self._file
        os.close(old)


def _open(path: Path) -> int:
    """Opens the file, and refuses one that belongs to another user or that a link of another user leads to."""
    setting = f"server.audit_log = {path}"
    try:
        check_folder(setting, path.absolute().parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        opened = os.open(path, flags, 0o600)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"{setting}: {why}; choose another file") from error
    found = os.fstat(opened)
    why = ""
    if not stat.S_ISREG(found.st_mode):
        why = "it is no regular file"
    elif found.st_uid not in (0, os.geteuid()):
        why = f"it belongs to user {found.st_uid}"
    elif found.st_nlink > 1:
        why = f"it has {found.st_nlink} names, so another user may have linked it to another file"
    if why:
        os.close(opened)
        raise ConfigError(f"{setting}: {why}; remove it or choose another file")
    return opened
