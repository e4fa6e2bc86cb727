"""Adapters for other libraries, each imported by its own name: `sb3` and `torchrl`."""
