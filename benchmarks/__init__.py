"""Measurements side by side: every row in its own process, rounds alternating, medians, versions and machine."""
