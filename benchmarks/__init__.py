"""Benchmarks of lowmem. Files of results record the figures of every round, the versions of packages and the
machine."""
