"""Measures everything that only a card can show, with one command: `python -m benchmarks.card`."""
