"""Makes torch use deterministic algorithms, so that a card gives the same bits each time, too.

Without it some of CUDA's sums are in the order in which blocks of threads end: attention's backward pass, scattered
additions. A CPU with the same number of threads gives the same bits anyway. It costs time in these operators, and a
workspace of 32 MiB for cuBLAS (docs.nvidia.com/cuda/cublas, "Results reproducibility").
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowmem.system.errors import Refused

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REFUSED = "does not have a deterministic implementation"  # in the words of torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Args: wanted: False: does nothing.

    Raises:
        Refused: an operator of the model has no deterministic algorithm.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, tuned = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    os.environ.setdefault(WORKSPACE, ":4096:8")  # 8 buffers of 4 MiB; cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it only finds errors in kernels, and takes time
    torch.backends.cudnn.benchmark = False  # else the fastest algorithm of the moment is taken
    try:
        yield
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        operator = str(error).split(" ")[0]
        raise Refused(
            f"deterministic=true: torch has no deterministic algorithm for {operator}, which this model uses. Type "
            "deterministic=false or another model.attention=."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, tuned
