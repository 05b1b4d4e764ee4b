"""Write the Python code of the contracts in `proto/` into `prefixd/v1/`, or check that it is current.

    python proto/generate.py           # write
    python proto/generate.py --check   # compare; exit status 1 and a list where something differs

The generated files are committed, so that an installation needs no compiler.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
REPOSITORY = PROTO_ROOT.parent
PACKAGE = Path("prefixd/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(output: Path) -> None:
    """Compile every contract into `output`/prefixd/v1.

    The folders of the contracts are those of the Python package, so protoc's own imports
    (`from prefixd.v1 import cache_pb2`) are right as written.

    Raises:
        SystemExit: protoc refused a contract; it has printed the line.
    """
    # Imported late: `--help` and the comparison must not need a compiler.
    from grpc_tools import protoc

    contracts = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not contracts:
        raise SystemExit(f"no contract found in {PROTO_ROOT / PACKAGE}")
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO_ROOT}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            *map(str, contracts),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with exit status {status}; its message is above")


def generated_files(root: Path) -> dict[str, bytes]:
    """Name and content of every generated file in `root`/prefixd/v1."""
    folder = root / PACKAGE
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIXES)}


def differences(committed: dict[str, bytes], current: dict[str, bytes]) -> list[str]:
    """One line for each file that is missing, left over or not what protoc writes now."""
    lines = []
    for name in sorted(committed.keys() | current.keys()):
        if name not in committed:
            lines.append(f"{PACKAGE / name} is missing")
        elif name not in current:
            lines.append(f"{PACKAGE / name} has no contract any more")
        elif committed[name] != current[name]:
            lines.append(f"{PACKAGE / name} differs from what {PACKAGE / contract_of(name)} says")
    return lines


def contract_of(generated: str) -> str:
    """The contract's file name for a generated file's name."""
    return generated.split("_pb2", 1)[0] + ".proto"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate prefixd/v1 from the contracts in proto/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the code is not current")
    check = parser.parse_args(arguments).check

    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        current = generated_files(Path(scratch))
    target = REPOSITORY / PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    committed = generated_files(REPOSITORY)
    stale = differences(committed, current)

    if check:
        if stale:
            print("The generated code is not current:", *stale, sep="\n  ", file=sys.stderr)
            print("Run `make proto` and commit what it writes.", file=sys.stderr)
            return 1
        print(f"{len(current)} generated files are current.")
        return 0
    for name in committed.keys() - current.keys():
        (target / name).unlink()
    for name, content in current.items():
        if committed.get(name) != content:
            (target / name).write_bytes(content)
    print(f"{len(current)} files in {PACKAGE}, {len(stale)} changed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
