"""Predicts the memory and time of a run before it starts: traces shapes, searches recipes, counts seconds."""
