"""`python -m prefixd`: the command line."""

from prefixd.cli import main

if __name__ == "__main__":
    main()
