"""Benchmarks of lowmem. Every row runs in its own process, and results record medians, versions and the machine."""
