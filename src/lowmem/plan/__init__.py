"""What a run will need, before anyone waits for it: traced by shape, derived for a table of recipes, and timed."""
