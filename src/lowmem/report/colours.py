"""Defines the colours of memory.png and of the comparison page. No colour stands for both a category and a run."""

OF_CATEGORY = {
    "weights": "#3b6fb6",
    "gradients": "#e08b2f",
    "optimizer": "#7a5195",
    "activations": "#3f9d6b",
    "other": "#9a9a9a",
}
# CIE76 distances: at least 30 from every category and 25 from each other. With more colours, some would look alike.
OF_RUNS = ("#cf1f4a", "#12a5b0", "#9aa800", "#e86fc0", "#9c5a33", "#5ad1ff", "#ff6f61", "#a8005c")
INK = "#5b7083"  # neither category nor run: runs in the background, the process, the allocator
LIMIT = "#c0392b"
