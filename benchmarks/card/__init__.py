"""Measures everything that needs a real GPU, with one command: `python -m benchmarks.card`."""
