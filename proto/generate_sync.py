"""Write the client without async, `prefixd/client/sync.py`, from the asyncio classes, or check that it is current.

    python proto/generate_sync.py           # write
    python proto/generate_sync.py --check   # compare; exit status 1 where it differs

A blocking class has the public methods and properties of its asyncio class, with their signatures and docstrings. A
method runs the asyncio one in the client's `Portal`. Names are replaced in annotations and docstrings, as by `unasync`:

    async def acquire(...) -> AsyncLease             def acquire(...) -> Lease
    def verify() -> AsyncGenerator[Progress, None]   def verify() -> Iterator[Progress]
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CLIENT = Path("prefixd/client")
TARGET = CLIENT / "sync.py"

# A blocking class, and where its asyncio class and the base of that are.
CLASSES = {
    "Lease": ("memory/leases.py", "memory/leases.py"),
    "Reservation": ("memory/leases.py", "memory/leases.py"),
    "Cache": ("cache.py", None),
    "Client": ("client.py", None),
}
BASE = "Hold"
# What the other parts of the client use, and no caller of a blocking client.
LEFT_OUT = {"before_close", "check", "connection", "copy_in", "copy_out", "copying", "on_session_lost", "session"}
WORDS = (
    (re.compile(r"\bAsync(Client|Cache|Lease|Reservation)\b"), r"\1"),
    (re.compile(r"\bAsyncGenerator\[(.+), None\]"), r"Iterator[\1]"),
    (re.compile("`async with`"), "`with`"),
    (re.compile("; belongs to one event loop"), "; usable from several threads at once"),
)
HEADER = '''"""The client without async: the same calls, each blocking its thread until the answer is there.

Made from the asyncio classes by `proto/generate_sync.py` (`make proto`): change those. A call runs the asyncio one in
the client's own thread, in which callbacks are called too. Clients and caches may be used by several threads at once;
a lease or reservation belongs to one thread at a time.
"""

from __future__ import annotations

'''
# By the class; `__init__` and `close` of a client are no plain calls of the asyncio ones.
WITH = """
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
LEAVE_HOLD = """with suppress(*(() if kind is None else (ClientError,))):
            self.release()
"""
LEAVE_CLIENT = "self.close()\n"
CLOSE = """with suppress(ClientClosed):
            self._portal.run(self._inner.close())
        self._portal.stop()
"""
IMPORTS = """
from contextlib import suppress
from types import TracebackType
from typing import Self
from prefixd.client.connecting.portal import Blocking, Portal
from prefixd.client.errors import ClientClosed, ClientError
from collections.abc import Iterator
"""


class Source:
    """A module of the asyncio client: its classes, and the imports that its names come from."""

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text())
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.imports = {
            alias.asname or alias.name: f"from {node.module} import {ast.unparse(alias)}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


def generate() -> str:
    """The text of `prefixd/client/sync.py`."""
    sources = {name: Source(REPOSITORY / CLIENT / name) for paths in CLASSES.values() for name in paths if name}
    imports, classes = set(IMPORTS.split("\n")), []
    for name, (path, base_path) in CLASSES.items():
        source = sources[path]
        members: dict[str, tuple[Source, ast.stmt, str]] = {}
        for origin, node in ([(sources[base_path], BASE)] if base_path else []) + [(source, "Async" + name)]:
            for member, statement, docstring in _members(origin.classes[node]):
                members[member] = origin, statement, docstring
        text = f"class {name}(Blocking[Async{name}]):\n{_docstring(source.classes['Async' + name])}"
        imports.add(f"from prefixd.client.{path[:-3].replace('/', '.')} import Async{name}")
        for member, (origin, statement, docstring) in members.items():
            text += _member(name, member, statement, docstring)
            imports |= {origin.imports[used] for used in _names(statement) & origin.imports.keys()}
        if name in ("Lease", "Reservation", "Client"):
            text += WITH + (LEAVE_CLIENT if name == "Client" else LEAVE_HOLD)
        classes.append(text)
    return _formatted(HEADER + "\n".join(sorted(imports)) + "\n\n\n" + "\n\n".join(classes))


def _members(of: ast.ClassDef) -> Iterator[tuple[str, ast.stmt, str]]:
    """The public attributes, properties and methods of a class, in its order: name, statement and docstring."""
    for statement, after in zip(of.body, [*of.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), "it has a docstring"
            yield statement.target.id, statement, f'        """{_replaced(str(after.value.value))}"""\n'
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            name = statement.name
            if name not in LEFT_OUT and (not name.startswith("_") or (name, of.name) == ("__init__", "AsyncClient")):
                yield name, statement, _docstring(statement)


def _member(cls: str, name: str, statement: ast.stmt, docstring: str) -> str:
    if isinstance(statement, ast.AnnAssign):
        return _property(name, ast.unparse(statement.annotation), docstring)
    assert isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.returns is not None
    returned = ast.unparse(statement.returns)
    if statement.decorator_list and ast.unparse(statement.decorator_list[0]) == "property":
        return _property(name, returned, docstring)
    head = f"\n    def {name}({ast.unparse(statement.args)}) -> {returned}:\n"
    call = f"self._inner.{name}({', '.join(_passed(statement.args))})"
    if name == "__init__":
        body = f"super().__init__(Async{cls}({', '.join(_passed(statement.args))}), Portal())\n"
    elif name == "close":
        body = CLOSE
    elif returned.startswith("AsyncGenerator"):
        body = f"yield from self._portal.each({call})\n"
    elif isinstance(statement, ast.FunctionDef):
        body = f"return {call}\n"
    elif returned.startswith("Async"):
        body = f"return {_replaced(returned)}(self._portal.run({call}), self._portal)\n"
    else:
        body = f"{'' if returned == 'None' else 'return '}self._portal.run({call})\n"
    return f"{_replaced(head)}{docstring}        {body}"


def _property(name: str, annotation: str, docstring: str) -> str:
    head = f"\n    @property\n    def {name}(self) -> {_replaced(annotation)}:\n"
    return f"{head}{docstring}        return self._inner.{name}\n"


def _passed(arguments: ast.arguments) -> Iterator[str]:
    for argument in [*arguments.args[1:], *arguments.kwonlyargs]:
        blocking = argument.annotation is not None and "Async" in ast.unparse(argument.annotation)
        value = f"[each._inner for each in {argument.arg}]" if blocking else argument.arg
        yield value if argument in arguments.args else f"{argument.arg}={value}"


def _docstring(of: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Its docstring as it stands there, with the words of a blocking client."""
    text = ast.get_docstring(of, clean=False)
    assert text is not None, f"{of.name} has a docstring"
    return f'{" " * (4 if isinstance(of, ast.ClassDef) else 8)}"""{_replaced(text)}"""\n'


def _replaced(text: str) -> str:
    for word, by in WORDS:
        text = word.sub(by, text)
    return text


def _names(statement: ast.stmt) -> set[str]:
    """The names in a member's annotations and defaults."""
    if isinstance(statement, ast.AnnAssign):
        roots: list[ast.AST] = [statement.annotation]
    else:
        assert isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.returns is not None
        roots = [statement.args, statement.returns]
    return {node.id for root in roots for node in ast.walk(root) if isinstance(node, ast.Name)}


def _formatted(text: str) -> str:
    """The text as `make check` wants it."""
    for command in (["check", "--quiet", "--fix"], ["format", "--quiet"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"],
            input=text,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
        )
        if not done.stdout:
            raise SystemExit(f"ruff refuses the generated code: {done.stderr}")
        text = done.stdout
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Generate {TARGET} from the asyncio client.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file is not current")
    check = parser.parse_args(arguments).check
    target, current = REPOSITORY / TARGET, generate()
    if check and target.read_text() != current:
        print(f"{TARGET} differs from the asyncio client. Run `make proto` and commit what it writes.", file=sys.stderr)
        return 1
    if not check:
        target.write_text(current)
    print(f"{TARGET} is current.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
