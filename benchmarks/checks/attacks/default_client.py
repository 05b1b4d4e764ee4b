"""`... default_client UID`: a victim of that user who calls the daemon at the default address, once."""

from __future__ import annotations

import sys

from benchmarks.checks.attacks.people import become
from prefixd.client import Client, ClientError


def main() -> None:
    """The process."""
    become(int(sys.argv[1]))
    try:
        with Client(timeout_s=5.0) as client:
            client.cancel("1")
        print("answered")
    except ClientError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
