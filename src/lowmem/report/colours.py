"""Defines the colors of memory.png and of the comparison page. The colors of categories differ from the colors of
runs."""

OF_CATEGORY = {
    "weights": "#3b6fb6",
    "gradients": "#e08b2f",
    "optimizer": "#7a5195",
    "activations": "#3f9d6b",
    "other": "#9a9a9a",
}
# Minimum CIE76 distances: 30 to the color of each category, and 25 between runs. More colors would look alike.
OF_RUNS = ("#cf1f4a", "#12a5b0", "#9aa800", "#e86fc0", "#9c5a33", "#5ad1ff", "#ff6f61", "#a8005c")
INK = "#5b7083"  # for runs in the background, the process, the allocator and drives
LIMIT = "#c0392b"
