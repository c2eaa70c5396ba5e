"""In what memory is counted, and by what: known without importing torch."""

GIB = 2**30
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")
