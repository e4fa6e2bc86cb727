"""The buffer's own steps, one module a way to run them: `reference` (PyTorch, any device), `cpu` and `triton`."""
