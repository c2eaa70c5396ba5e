"""Finished runs, side by side: folders -> figures -> a table and a page."""
