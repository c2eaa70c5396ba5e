"""The planner predicts the memory and time of a run before it starts. It traces the run on fake tensors, searches
recipes (sets of overrides) that fit, and estimates the time of an optimizer step."""
