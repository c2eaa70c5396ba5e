"""Wraps every private part of torch and transformers that this package uses. All other files import the wrappers from
here.

The docstring or comment of a wrapper states its purpose. A sentence that begins with "Instead" states what could
replace the private part; the constants have no such sentence. `test_torch_private.py` fails if a new version has
removed or changed a private part, and refuses private names of other packages outside this file and
`lightning_private.py`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn

# The class of operators such as `torch.ops.aten.mm.default`, which dispatch modes receive. Instead: the type of such an
# operator.
from torch._ops import OpOverload

# For the planner: tensors that have a shape, a dtype and a storage, but no memory. Instead: the meta device, and a
# replacement for code that reads the device of a tensor.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

# For the planner: a process group that needs no other processes, to trace runs on several devices. Instead: real
# processes.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Intercepts each operator, for the memory meter, the planner and selective checkpointing. torch's notes "Extending
# PyTorch" recommend this class. Instead: nothing.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Find tensors in nested arguments and results. Instead: twenty lines of code, or the package optree.
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = (
    "ADDS_IN_PARTS",
    "ASKS_FOR_DEVICE",
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "ATTENTION_BACKWARD_ON_CPU",
    "ATTENTION_CUDNN",
    "ATTENTION_EFFICIENT",
    "ATTENTION_FLASH",
    "ATTENTION_MATH",
    "ATTENTION_ON_CPU",
    "COMPARES",
    "GROUPED_PRODUCTS",
    "MAKES_OF_NUMBERS",
    "NONZERO",
    "READ_A_NUMBER",
    "SPLIT",
    "WAITS",
    "FakeStore",
    "FakeTensor",
    "LeanFakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "all_unexpected",
    "allow_graphs",
    "attention_taken",
    "boundaries_count_as_real",
    "check_reduced",
    "compilation_errors",
    "cpu_multiplies_in",
    "group_of",
    "hand_on_first_tokens",
    "has_kernel",
    "has_memory_budget",
    "in_backward",
    "is_traceable_wrapper_subclass",
    "known_first_tokens",
    "modes_of_this_thread",
    "open_checkpoint",
    "rebuild_buckets",
    "replaced_kernels",
    "schema",
    "set_timeout",
    "storage_key",
    "tensors_count_as_real",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
    "within_budget",
)

aten = torch.ops.aten
CPU = torch.device("cpu")
# torch's attention operators, one per kernel. The public function `F.scaled_dot_product_attention` calls one of these
# operators, and a dispatch mode sees this operator, not the function. In inference mode the dispatch mode sees only
# `aten.scaled_dot_product_attention`.
ATTENTION_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ATTENTION_FLASH = aten._scaled_dot_product_flash_attention.default
ATTENTION_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
ATTENTION_CUDNN = aten._scaled_dot_product_cudnn_attention.default
ATTENTION = (ATTENTION_ON_CPU, ATTENTION_FLASH, ATTENTION_EFFICIENT, ATTENTION_CUDNN)
ATTENTION_BACKWARD = (
    ATTENTION_BACKWARD_ON_CPU,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
# Attention computed by matmuls and a softmax, if no fused kernel supports the inputs. A dispatch mode sees the matmuls
# and the softmax instead of this operator. The planner calls the operator's `decompose`.
ATTENTION_MATH = aten._scaled_dot_product_attention_math.default
READ_A_NUMBER = aten._local_scalar_dense.default  # called by `.item()` and `bool()`
NONZERO = aten.nonzero.default  # called by mixtures of experts that find the tokens of one expert after another
COMPARES = (aten.equal.default, aten.allclose.default)  # called by `torch.equal` and `torch.allclose`
MAKES_OF_NUMBERS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # called by `torch.tensor`
ADDS_IN_PARTS = torch.ops.c10d._reduce_scatter_base_.default  # called by fully_shard to reduce-scatter gradients
WAITS = torch.ops._c10d_functional.wait_tensor.default  # waits for a collective before its result is used
SPLIT = aten.split_with_sizes.default  # called by mixtures of experts to split their tokens into a tensor per expert
ASKS_FOR_DEVICE = torch.ops.prim.device.default  # called by C++ code to read the device of a fake tensor
GROUPED_PRODUCTS = aten._grouped_mm.default  # called by transformers' mixtures of experts
CAUSAL = "transformers.masking_utils", "causal_mask_function"
SEPARATES = {  # the functions from which transformers composes a causal mask that separates documents
    CAUSAL,
    *((CAUSAL[0], name) for name in ("and_masks", "packed_sequence_mask_function", "sliding_window_overlay")),
    (CAUSAL[0], "remap_positions_for_packed_sequence"),
}


class LeanFakeTensorMode(FakeTensorMode):
    """A fake tensor mode for CPU tensors, for callers that compute the outputs of an operator themselves. Instead:
    FakeTensorMode, with which a trace takes three times as long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's check would take as long as the operator itself

    @cached_property
    def same_of_all(self) -> dict:
        return dict(FakeTensor(self, torch.empty(0, device="meta"), CPU).__dict__)

    def holding(self, tensor: Tensor) -> FakeTensor:
        """Returns a fake tensor with the storage of a meta tensor. Copies the attributes that are equal for all tensors
        of a mode, because the constructor of FakeTensor, which sets each attribute, would account for half of the time
        that each operator takes."""
        fake = Tensor._make_subclass(FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self.same_of_all)
        return fake


def storage_key(tensor: Tensor | UntypedStorage) -> int:
    """Returns a key of a tensor's storage. Tensors that share a storage have the same key. The key is valid while the
    storage exists. Instead: nothing; `data_ptr` is 0 for every fake tensor."""
    return (tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor)._cdata


def schema(func: OpOverload) -> torch.FunctionSchema:
    """Returns the schema of an operator: its arguments and results, and which arguments it changes in place. Instead:
    parsing `str(func)`."""
    return func._schema


def group_of(boxed: object) -> torch.distributed.ProcessGroup:
    """Returns the process group that a collective operator received as an argument, boxed or as a name. Instead:
    nothing; no public function unboxes a group."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    if isinstance(boxed, str):
        return _resolve_process_group(boxed)
    group = torch.distributed.ProcessGroup
    return boxed if isinstance(boxed, group) else group.unbox(boxed)


def set_timeout(group: torch.distributed.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of later collectives of a process group. Instead: nothing; the groups of a device mesh have
    torch's default timeout."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    with warnings.catch_warnings():
        # the fake backend has no timeout
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        _set_pg_timeout(timeout, group)


@contextmanager
def allow_graphs(number: int) -> Iterator[None]:
    """Context manager that lets torch.compile compile at least `number` graphs of a function. Instead: an argument of
    torch.compile, which the oldest supported torch version lacks."""
    from torch._dynamo import config  # imported here because the import takes over a second

    before = config.recompile_limit
    config.recompile_limit = max(before, number)
    try:
        yield
    finally:
        config.recompile_limit = before


def compilation_errors() -> type[Exception]:
    """Returns the base class of torch.compile's errors. Instead: nothing; no public class distinguishes these errors
    from errors of the model."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def within_budget(share: float) -> AbstractContextManager:
    """Context manager that limits how many bytes of activations compiled graphs save for backward. The limit applies to
    graphs that are compiled inside the `with`. Args: share: 1: the bytes that torch's default saves; 0: the bytes that
    full recomputation saves. Instead: an argument of torch.compile."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=share)


def has_memory_budget() -> bool:
    """Returns whether torch.compile has the setting that `within_budget` changes. Instead: a table of torch
    versions."""
    from torch._functorch import config

    return hasattr(config, "activation_memory_budget")


def open_checkpoint(again: Callable[[], None]) -> Iterator[None]:
    """Checkpoints a segment of code that this function does not call itself, such as several blocks of a model: the
    first `next` on the returned generator starts the segment, the second `next` ends it, and backward calls `again` to
    recompute it. Instead: `torch.utils.checkpoint.checkpoint`, which calls a function. With `checkpoint`, a segment
    could only be a single block, so `every_k` and `sqrt` would have to be removed."""
    from torch.utils.checkpoint import _checkpoint_without_reentrant_generator as checkpointed

    # The caller saves random states for each block, because some models draw random numbers between two blocks.
    return checkpointed(again, preserve_rng_state=False)


def in_backward() -> bool:
    """Returns whether this thread runs a backward pass or the recomputation in a backward pass. Instead: a flag, set by
    all code that recomputes."""
    return torch._C._current_graph_task_id() != -1


def modes_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that another thread calls to get a context manager in which the torch modes of this thread are
    active. Both threads share the mode objects, and `__enter__` of the modes is not called again. Instead: nothing; no
    public function returns the active modes."""
    from torch import overrides as functions
    from torch.utils import _python_dispatch as operators

    of_functions = functions._get_current_function_mode_stack()
    of_operators = operators._get_current_dispatch_mode_stack()

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as modes:
            for mode in of_functions:
                functions._push_mode(mode)
                modes.callback(functions._pop_mode)
            for mode in of_operators:
                operators._push_mode(mode)
                modes.callback(operators._pop_mode, getattr(mode, "_mode_key", None))
            yield

    return applied


@contextmanager
def replaced_kernels(key: str = "") -> Iterator[torch.library.Library]:
    """Context manager that yields a library. Kernels that are registered in this library replace torch's kernels until
    the end of the `with`. Args: key: the dispatch key of the kernels; "": each registration names the key. Instead:
    deleting all references to the library."""
    ours = torch.library.Library("aten", "IMPL", key)
    try:
        yield ours
    finally:
        ours._destroy()


def has_kernel(operator: str, key: str) -> bool:
    """Returns whether an operator has a kernel for a dispatch key. Instead: a table of torch versions."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)


def cpu_multiplies_in(name: str) -> bool:
    """Returns whether this CPU has instructions for matmuls in a 16-bit dtype. Also returns True if torch was built
    without oneDNN and therefore cannot tell. Args: name: "bf16" or "fp16". Instead: the flags in /proc/cpuinfo."""
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is None or ask()


def attention_taken(model: nn.Module) -> str:
    """Returns the name of the attention implementation that transformers uses for a model, such as "sdpa". Instead:
    nothing; no public attribute has the name."""
    return model.config._attn_implementation


@contextmanager
def all_unexpected() -> Iterator[set[str]]:
    """Context manager that yields a set. When transformers loads a model inside the `with`, the names of all tensors
    that the model class does not expect are added to the set, including names that the class tells transformers to
    ignore. Instead: an entry of transformers' loading info."""
    from transformers import PreTrainedModel  # takes seconds, and most functions of this file need only torch

    found: set[str] = set()
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def adjusted(model: nn.Module, info: object) -> None:
        found.update(info.unexpected_keys)
        adjust(model, info)

    with patch.object(PreTrainedModel, "_adjust_missing_and_unexpected_keys", adjusted):
        yield found


def boundaries_count_as_real() -> AbstractContextManager:
    """Context manager in which transformers treats every row as packed with several documents. Otherwise transformers
    checks the values of the position ids, which fake tensors lack, and would not mask documents. Instead: an argument
    of transformers."""
    return patch("transformers.masking_utils.find_packed_sequence_indices", _documents)


def _documents(position_ids: Tensor) -> Tensor:
    """Returns a tensor (B, T): for each token, the index of its document in the row. Counts documents like
    `find_packed_sequence_indices` of transformers."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


def hand_on_first_tokens() -> None:
    """Patches transformers for the rest of the process, so that finding the documents of packed rows does not make the
    host wait for the GPU.

    The loader sets the attribute `counted_first` of position ids: a list with the offset of each document's first token
    in the concatenated rows, and at the end the total number of tokens. The patched function also sets this list on the
    document indices from which masks are made. If each row is a single document, the patched function returns None, so
    that transformers makes masks without document indices. For position ids without `counted_first`, transformers reads
    the values from the GPU. Instead: an argument of transformers.
    """
    from transformers import masking_utils

    asked = masking_utils.find_packed_sequence_indices

    def documents_of(position_ids: Tensor) -> Tensor | None:
        first = getattr(position_ids, "counted_first", None)
        if first is None:
            return asked(position_ids)
        if len(first) == len(position_ids) + 1:  # each row is one document
            return None
        documents = _documents(position_ids)
        documents.counted_first = first
        return documents

    masking_utils.find_packed_sequence_indices = documents_of


def known_first_tokens(mask_function: Callable, tokens: int) -> list[int] | None:
    """Returns the list `counted_first` (see `hand_on_first_tokens`) of the document indices from which transformers
    made a mask function. Returns None if these indices have no such list, or if the mask does anything except causal
    masking within each document. (A sliding window of at least `tokens` tokens, the length of a row, has no effect.)
    Instead: evaluating the mask, which reads from the device."""
    first, made_by, parts = None, set(), [mask_function]
    for part in parts:  # the loop appends to this list
        if isinstance(part, Tensor):
            first = getattr(part, "counted_first", first)
        elif isinstance(part, int):  # the length of a sliding window, in tokens
            if part < tokens:
                return None
        elif isinstance(part, tuple):
            parts += part
        else:
            made_by.add((getattr(part, "__module__", ""), getattr(part, "__qualname__", "").partition(".")[0]))
            parts += [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
    return first if CAUSAL in made_by <= SEPARATES else None


def tensors_count_as_real() -> AbstractContextManager:
    """Context manager in which transformers does not recognize fake tensors. Otherwise transformers would assume that a
    graph is being traced, and would materialize every mask. The patch is a lambda because a mock would keep references
    to all tensors that it is called with. Instead: an argument of transformers."""
    return patch("transformers.utils.import_utils.is_fake_tensor", lambda _: False)


def rebuild_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Rebuilds DDP's buckets in the order in which gradients became ready. All ranks must call this function, and must
    do so before training, because DDP's own rebuild, in a later forward pass, would create new buckets while gradients
    still keep the old buckets in memory. Instead: DDP's own rebuild."""
    ddp.reducer._rebuild_buckets()


def check_reduced(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Checks that the last backward pass has averaged all gradients. DDP itself checks this only before the next
    forward pass, when the optimizer has already used the gradients. Instead: DDP's own check.

    Raises:
        RuntimeError: some gradients were not averaged.
    """
    ddp._check_reducer_finalized()
