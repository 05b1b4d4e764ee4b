"""`... default_client UID`: a victim, run by that user, that calls the daemon at the default address once."""

from __future__ import annotations

import sys

from benchmarks.checks.attacks.people import become
from prefixd.client import Client, ClientError


def main() -> None:
    """Makes one call as the given user."""
    become(int(sys.argv[1]))
    try:
        with Client(timeout_s=5.0) as client:
            client.cancel("1")
        print("answered")
    except ClientError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
