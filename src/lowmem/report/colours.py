"""Assigns colours, in memory.png and on the comparison page: one colour is a category or a run, never both."""

OF_CATEGORY = {
    "weights": "#3b6fb6",
    "gradients": "#e08b2f",
    "optimizer": "#7a5195",
    "activations": "#3f9d6b",
    "other": "#9a9a9a",
}
# More than 30 (CIE76) from every category and 25 from each other: nobody could tell more of them apart.
OF_RUNS = ("#cf1f4a", "#12a5b0", "#9aa800", "#e86fc0", "#9c5a33", "#5ad1ff", "#ff6f61", "#a8005c")
INK = "#5b7083"  # what is neither: the runs that are not picked out, the process, the allocator
LIMIT = "#c0392b"
