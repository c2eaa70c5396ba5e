"""The planner predicts the memory and time of a run before it starts. It traces the run on fake tensors, estimates the
time of an optimizer step, and can search recipes (sets of overrides) that fit."""
