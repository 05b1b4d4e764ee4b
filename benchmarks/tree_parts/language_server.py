"""A language server as a child process, spoken to over its standard streams: JSON-RPC, as its protocol 3.17 says."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Self

from benchmarks.common.harness import BenchmarkError

_LARGEST_MESSAGE = 16 << 20
_END_S = 5.0
_LAST_BYTES = 2048
_ERROR = 1  # DiagnosticSeverity
_NO_MESSAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class LanguageServerError(BenchmarkError):
    """The language server is missing, died, or does not answer as it should."""


@dataclass(frozen=True, slots=True, order=True)
class Diagnostic:
    """An error in a text. line: from 0."""

    line: int
    message: str


def pylsp() -> list[str]:
    """The command line of python-lsp-server. Raises LanguageServerError when it is not installed."""
    for module, package in (("pylsp", "python-lsp-server"), ("pyflakes", "pyflakes")):
        if importlib.util.find_spec(module) is None:
            raise LanguageServerError(f"{package} is not installed: pip install 'prefixd[bench]'")
    return [sys.executable, "-m", "pylsp"]


class LanguageServer:
    """A running language server for Python; a context manager that ends its process.

    command: its command line. timeout_s: how long it may take to answer.
    """

    def __init__(self, command: Sequence[str], timeout_s: float = 60.0) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stderr: IO[bytes] | None = None
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._published: dict[str, asyncio.Future[list[Diagnostic]]] = {}
        self._broken: LanguageServerError | None = None

    async def __aenter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C reaches us alone, and we end it in order
            )
        except OSError as error:
            self._stderr.close()
            raise LanguageServerError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        self._reader = asyncio.create_task(self._read())
        try:
            await self._request("initialize", {"processId": os.getpid(), "rootUri": None, "capabilities": {}})
            self._notify("initialized", {})
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            if self._broken is None:
                with suppress(LanguageServerError):
                    await self._request("shutdown", None, _END_S)
                    self._notify("exit", None)
        finally:
            await self._end()

    async def check(self, text: str) -> list[Diagnostic]:
        """The errors in a Python program, by line: what the server publishes, and names that a module does not have.

        The latter are those behind the name of an imported module whose definition the server does not find.
        Raises LanguageServerError.
        """
        uri = f"file:///prefixd-tree-search/{next(self._ids)}.py"
        published = self._published[uri] = asyncio.get_running_loop().create_future()
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        try:
            self._notify("textDocument/didOpen", {"textDocument": document})
            found = await self._within(published, "the diagnostics of a text", self._timeout_s)
            for line, character, name in _module_attributes(text):
                position = {"line": line, "character": character}
                where = {"textDocument": {"uri": uri}, "position": position}
                if not await self._request("textDocument/definition", where):
                    found.append(Diagnostic(line, f"module has no attribute '{name}'"))
            self._notify("textDocument/didClose", {"textDocument": {"uri": uri}})
        finally:
            del self._published[uri]
        return sorted(set(found))

    async def _request(self, method: str, params: Any, timeout_s: float | None = None) -> Any:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "method": method, "params": params})
            return await self._within(answer, method, timeout_s or self._timeout_s)
        finally:
            del self._answers[number]

    def _notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def _send(self, message: dict[str, Any]) -> None:
        if self._broken is not None:
            raise self._broken
        assert self._process is not None and self._process.stdin is not None, "it was started with a pipe"
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    async def _within(self, answer: asyncio.Future[Any], what: str, timeout_s: float) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise LanguageServerError(f"the language server did not answer within {timeout_s:g} s: {what}") from error

    async def _read(self) -> None:
        """Hands out what the server sends, until it ends or sends what is no message."""
        assert self._process is not None and self._process.stdout is not None, "it was started with a pipe"
        try:
            while True:
                self._take(json.loads(await _body(self._process.stdout)))
        except asyncio.IncompleteReadError:
            status = await self._process.wait()
            self._break(LanguageServerError(f"the language server ended with status {status}{self._last_words()}"))
        except (*_NO_MESSAGE, asyncio.LimitOverrunError) as error:
            self._break(LanguageServerError(f"the language server sent what is no message: {error!r}"))

    def _take(self, message: Any) -> None:
        """One message: an answer, the diagnostics of a text, or a request, of which this client knows none."""
        method, number = message.get("method"), message.get("id")
        if method is None:
            answer = self._answers.get(number)
            if answer is None or answer.done():
                return  # nobody waits for it any more
            if "error" in message:
                why = message["error"]["message"]
                answer.set_exception(LanguageServerError(f"the language server refused a request: {why}"))
            else:
                answer.set_result(message["result"])
        elif number is not None:
            self._send({"id": number, "error": {"code": -32601, "message": f"this client knows no {method}"}})
        elif method == "textDocument/publishDiagnostics":
            errors = [
                Diagnostic(int(each["range"]["start"]["line"]), str(each["message"]))
                for each in message["params"]["diagnostics"]
                if each.get("severity", _ERROR) == _ERROR
            ]
            published = self._published.get(message["params"]["uri"])
            if published is not None and not published.done():
                published.set_result(errors)

    def _break(self, error: LanguageServerError) -> None:
        self._broken = error
        for waiting in [*self._answers.values(), *self._published.values()]:
            if not waiting.done():
                waiting.set_exception(error)

    def _last_words(self) -> str:
        assert self._stderr is not None, "it was started with a file"
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _LAST_BYTES))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it said: {said}" if said else ""

    async def _end(self) -> None:
        process, reader = self._process, self._reader
        assert process is not None and reader is not None and self._stderr is not None, "it was started"
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._stderr.close()


async def _body(stream: asyncio.StreamReader) -> bytes:
    """The next message. Raises IncompleteReadError at the end, ValueError for what is no message."""
    length = -1
    while (line := await stream.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    if not 0 <= length <= _LARGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes; at most {_LARGEST_MESSAGE} are read")
    return await stream.readexactly(length)


def _module_attributes(text: str) -> list[tuple[int, int, str]]:
    """Line, character and name of what follows an imported module's name and a dot; nothing for a text with a syntax
    error, which the server reports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return [
        (node.end_lineno - 1, node.end_col_offset - 1, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
        if node.end_lineno is not None and node.end_col_offset is not None
    ]
