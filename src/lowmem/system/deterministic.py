"""Makes torch use deterministic algorithms (`deterministic=true`), so that runs on a GPU are bitwise reproducible.

By default some CUDA kernels, for example those for scatter-add and for the backward pass of attention, add values in
the order in which thread blocks finish. Results on a CPU are reproducible with an equal number of threads.
Deterministic kernels are slower, and cuBLAS needs a workspace of 32 MiB (docs.nvidia.com/cuda/cublas, "Results
reproducibility").
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowmem.system.errors import Refused

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REFUSED = "does not have a deterministic implementation"  # quoted from torch's error


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Enables deterministic algorithms inside the `with`. The environment variable WORKSPACE stays set afterwards.
    Args: wanted: False makes this a no-op.

    Raises:
        Refused: an operator of the model has no deterministic algorithm.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, tuned = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    os.environ.setdefault(WORKSPACE, ":4096:8")  # 8 buffers of 4 MiB; cuBLAS reads the variable before its first matmul
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling only helps to find bugs, and takes time
    torch.backends.cudnn.benchmark = False  # otherwise cuDNN chooses the algorithm that is fastest in a trial run
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
