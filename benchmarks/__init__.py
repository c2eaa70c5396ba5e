"""Benchmarks of lowmem. Results record the figures of every round, the versions and the machine."""
