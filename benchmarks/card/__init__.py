"""Measures results that need a CUDA card, with one command: `python -m benchmarks.card`."""
