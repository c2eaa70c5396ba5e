"""In what memory is counted, and by what: known without importing torch."""

MIB, GIB = 2**20, 2**30
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")


def unit(largest: float) -> tuple[int, str, int]:
    """(bytes, name, digits behind the point) in which a table or a chart with this largest size is written."""
    return (GIB, "GiB", 3) if largest >= GIB else (MIB, "MiB", 1)
