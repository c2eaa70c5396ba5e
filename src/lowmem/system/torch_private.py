"""Wraps every private part of torch, Lightning and transformers that this package uses; no other file uses private
parts.

The docstring of each wrapper states its purpose and, after "Instead", the public API that could replace it.
`test_torch_private.py` names the parts that a new version has removed or changed. A test refuses private names of other
packages anywhere else.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn

# An operator with its types, as dispatch modes receive it. Instead: `torch.ops.aten.mm.default`'s own type.
from torch._ops import OpOverload

# Tensors with shape, dtype and storage but without memory, for the planner. Instead: the meta device, and a replacement
# for code that reads the device of a tensor.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

# A process group without processes, for the planner's runs on several devices. Instead: those processes.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Sees each operator: used by the meter, the planner and selective checkpointing. torch's notes on extending it
# recommend this class. Instead: nothing.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Finds tensors in nested arguments and results. Instead: twenty lines of our own, or the package optree.
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
# torch's attention operators, by kernel. The public function `F.scaled_dot_product_attention` calls one of them, and a
# dispatch mode sees only these.
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
# Attention as matmuls and a softmax, if no kernel supports the inputs. A dispatch mode sees the matmuls and the softmax
# in training, and this operator in inference.
ATTENTION_MATH = aten._scaled_dot_product_attention_math.default
READ_A_NUMBER = aten._local_scalar_dense.default  # called by `.item()` and `bool()`
NONZERO = aten.nonzero.default  # called by mixtures that run expert after expert, to find each expert's tokens
COMPARES = (aten.equal.default, aten.allclose.default)  # called by `torch.equal` and `torch.allclose`
MAKES_OF_NUMBERS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # called by `torch.tensor`
ADDS_IN_PARTS = torch.ops.c10d._reduce_scatter_base_.default  # called by fully_shard to reduce and scatter gradients
WAITS = torch.ops._c10d_functional.wait_tensor.default  # called before a received tensor is used
SPLIT = aten.split_with_sizes.default  # called by mixtures that split their tokens into a tensor per expert
ASKS_FOR_DEVICE = torch.ops.prim.device.default  # called by C++ code to ask for the device of a tensor without memory
GROUPED_PRODUCTS = aten._grouped_mm.default  # called by the mixtures of experts of transformers
CAUSAL = "transformers.masking_utils", "causal_mask_function"
SEPARATES = {  # the functions from which transformers builds a causal mask that separates documents
    CAUSAL,
    *((CAUSAL[0], name) for name in ("and_masks", "packed_sequence_mask_function", "sliding_window_overlay")),
    (CAUSAL[0], "remap_positions_for_packed_sequence"),
}


class LeanFakeTensorMode(FakeTensorMode):
    """A mode of CPU tensors without memory, for callers that know the outputs of an operator. Instead: the public mode,
    with which a trace takes three times as long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would take as long as the operator itself

    @cached_property
    def same_of_all(self) -> dict:
        return dict(FakeTensor(self, torch.empty(0, device="meta"), CPU).__dict__)

    def holding(self, tensor: Tensor) -> FakeTensor:
        """Returns a fake tensor with the storage of a meta tensor. The constructor of the class takes as long as the
        rest of an operator, since it sets attributes that are equal for all tensors of a mode."""
        fake = Tensor._make_subclass(FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self.same_of_all)
        return fake


def storage_key(tensor: Tensor | UntypedStorage) -> int:
    """Returns a key that all tensors of one storage share, valid while the storage exists. Instead: nothing; `data_ptr`
    is 0 for every tensor without memory."""
    return (tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor)._cdata


def schema(func: OpOverload) -> torch.FunctionSchema:
    """Returns the schema of an operator: its arguments, its results and which arguments it changes in place. Instead:
    `str(func)`, parsed by hand."""
    return func._schema


def group_of(boxed: object) -> torch.distributed.ProcessGroup:
    """Returns the process group that an operator received, boxed or as a name. Instead: nothing public unboxes it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    if isinstance(boxed, str):
        return _resolve_process_group(boxed)
    group = torch.distributed.ProcessGroup
    return boxed if isinstance(boxed, group) else group.unbox(boxed)


def set_timeout(group: torch.distributed.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of a group's later collectives. Instead: nothing; groups made by a mesh have torch's default
    timeout."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    with warnings.catch_warnings():
        # a backend that sends nothing has no timeout
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        _set_pg_timeout(timeout, group)


@contextmanager
def allow_graphs(number: int) -> Iterator[None]:
    """Lets torch.compile make up to `number` graphs of one function inside the `with`. Instead: an argument of
    torch.compile, which the oldest supported version lacks."""
    from torch._dynamo import config  # takes over a second

    before = config.recompile_limit
    config.recompile_limit = max(before, number)
    try:
        yield
    finally:
        config.recompile_limit = before


def compilation_errors() -> type[Exception]:
    """Returns the base class of torch.compile's errors. Instead: nothing public distinguishes them from errors of a
    model."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def within_budget(share: float) -> AbstractContextManager:
    """Limits the activations that graphs compiled inside the `with` store to a share of their bytes. Instead: an
    argument of torch.compile."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=share)


def has_memory_budget() -> bool:
    """Returns whether torch.compile has the setting of `within_budget`. Instead: a table of torch versions."""
    from torch._functorch import config

    return hasattr(config, "activation_memory_budget")


def open_checkpoint(again: Callable[[], None]) -> Iterator[None]:
    """Checkpoints code that other code calls, such as the blocks of a model: the first `next` opens the segment, the
    second one closes it, and `again` recomputes it. Instead: the public checkpoint, which calls a function itself. It
    supports segments of one block only, so every_k and sqrt would have to be removed."""
    from torch.utils.checkpoint import _checkpoint_without_reentrant_generator as checkpointed

    # Random states are saved per block: some models draw random numbers between two blocks.
    return checkpointed(again, preserve_rng_state=False)


def in_backward() -> bool:
    """Returns whether this thread runs a backward pass, recomputation included. Instead: a flag that all code that
    recomputes would have to set."""
    return torch._C._current_graph_task_id() != -1


def modes_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that makes a context for another thread, in which the torch modes of this thread are active.
    The mode objects are shared, and not entered a second time. Instead: nothing public tells which modes are active."""
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
    """Yields a library whose kernels replace torch's inside the `with`. Args: key: the dispatch key of the kernels.
    Instead: dropping the last reference to the library, hoping that no other reference exists."""
    ours = torch.library.Library("aten", "IMPL", key)
    try:
        yield ours
    finally:
        ours._destroy()


def has_kernel(operator: str, key: str) -> bool:
    """Returns whether an operator has a kernel for a dispatch key. Instead: a table of torch versions."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)


def cpu_multiplies_in(name: str) -> bool:
    """Returns whether this CPU has instructions for fp16 or bf16 matmuls; True if torch cannot tell (built without
    oneDNN). Instead: the flags in /proc/cpuinfo, by processor."""
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is None or ask()


def attention_taken(model: nn.Module) -> str:
    """Returns the name of the attention implementation that transformers uses for a model. Instead: nothing public
    shows it."""
    return model.config._attn_implementation


@contextmanager
def all_unexpected() -> Iterator[set[str]]:
    """Yields a set that collects the names of all unexpected tensors that transformers finds inside the `with`,
    including names that a model class declares to be ignored. Instead: an entry of transformers' loading info."""
    from transformers import PreTrainedModel  # takes seconds, and other functions of this file need only torch

    found: set[str] = set()
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def adjusted(model: nn.Module, info: object) -> None:
        found.update(info.unexpected_keys)
        adjust(model, info)

    with patch.object(PreTrainedModel, "_adjust_missing_and_unexpected_keys", adjusted):
        yield found


def boundaries_count_as_real() -> AbstractContextManager:
    """Makes transformers' check of position ids for a second document return True inside the `with`. Tensors without
    memory have no values to check, and transformers would not mask documents. Instead: an argument of transformers."""
    return patch("transformers.masking_utils.find_packed_sequence_indices", _documents)


def _documents(position_ids: Tensor) -> Tensor:
    """Returns the index of each token's document in its row, (B, T), as transformers counts them."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


def hand_on_first_tokens() -> None:
    """Tells transformers from now on whether a row has a second document, if the position ids have `counted_first`.
    Otherwise transformers reads the ids itself, and the host waits for the GPU. Masks get `counted_first`, too.
    Instead: an argument of transformers."""
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
    """Returns the `counted_first` from which a mask of transformers was made, if for rows of `tokens` tokens the mask
    is causal, separates documents and does nothing else; otherwise None. Instead: evaluating the mask, which reads from
    the device."""
    first, made_by, parts = None, set(), [mask_function]
    for part in parts:  # the list grows during the loop
        if isinstance(part, Tensor):
            first = getattr(part, "counted_first", first)
        elif isinstance(part, int):  # the size of a sliding window
            if part < tokens:
                return None
        elif isinstance(part, tuple):
            parts += part
        else:
            made_by.add((getattr(part, "__module__", ""), getattr(part, "__qualname__", "").partition(".")[0]))
            parts += [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
    return first if CAUSAL in made_by <= SEPARATES else None


def tensors_count_as_real() -> AbstractContextManager:
    """Keeps transformers from treating tensors without memory as a traced graph, for which it materializes every mask.
    Instead: an argument of transformers. (A mock would keep references to all tensors that it is called with.)"""
    return patch("transformers.utils.import_utils.is_fake_tensor", lambda _: False)


def rebuild_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Rebuilds DDP's buckets in the order in which gradients became ready. DDP itself rebuilds them only once,
    before the second window. Instead: DDP's own rebuild."""
    ddp.reducer._rebuild_buckets()


def check_reduced(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Checks that the last backward pass has averaged all gradients. DDP itself checks this only before the next
    forward pass, when the optimizer has already used the gradients. Instead: DDP's own check.

    Raises:
        RuntimeError: some gradients were not averaged.
    """
    ddp._check_reducer_finalized()
