"""Predicts the memory and time of a run before it starts: traces shapes, derives a table of recipes, counts seconds."""
