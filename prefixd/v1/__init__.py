"""Generated from `proto/prefixd/v1/*.proto` by `make proto`; do not edit."""
