"""Predicts the memory and time of a run before it starts: traces the run on fake tensors, searches recipes that fit,
and estimates the time of a step."""
