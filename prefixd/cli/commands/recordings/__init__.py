"""Commands that record a daemon's traffic or prefixes in a file: traces and warm-up files."""
