"""Runs the measurements that need a CUDA card, with one command: `python -m benchmarks.card`."""
