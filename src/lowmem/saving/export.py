"""Writes a trained model as a folder in Hugging Face's format, file by file, without a second model in memory.

transformers writes the folder from lazy tensors: each knows its shape and dtype, and is computed when its file is
written. If transformers computes with a tensor earlier, as with fused experts that files store separately, the tensor
is computed immediately. So the peak over the model is one file, and for a mixture of experts its experts.

If the model is sharded, the first process writes, and gathers one weight at a time from all processes (`Weights`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem.model.magnitude import Rounding
from lowmem.saving import old_spelling
from lowmem.system.atomic_files import atomic_write
from lowmem.system.fail_together import fail_together
from lowmem.system.torch_private import tree_map_only
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice

CARD = "README.md"  # the hub shows it as the model card
FILE_BYTES = 2 * 10**9  # maximum bytes per file, unless a single tensor is larger
_SAYS = {  # queries that a tensor without memory can answer
    *(Tensor.device.__get__, Tensor.dtype.__get__, Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement),
    *(Tensor.element_size, Tensor.untyped_storage, Tensor.is_floating_point),
}


class Later(Tensor):
    """A lazy tensor: its values are computed when an operation needs them."""

    compute: Callable[[], Tensor]

    @classmethod
    def computed_by(cls, compute: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> "Later":
        later = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        later.compute = compute
        return later

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in _SAYS:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(cls, lambda later: later.compute(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Weights:
    """Reads a model's weights at full precision. If the model is sharded, the first process gathers full weights into
    host memory, one by one; the other processes take part in each gather within `writing`.

    Args:
        shard: returns this process's shard of a parameter at full precision; any value, if the process has no shard of
            it.
        ranks: the strategy that shards the model.
    """

    def __init__(
        self,
        network: nn.Module,
        shard: Callable[[nn.Parameter], Tensor] = lambda p: p.data,
        ranks: OneDevice = ONE_DEVICE,
    ) -> None:
        self.shard, self.ranks = shard, ranks
        network.state_dict()  # makes a sharding engine free the full weights that it gathered for a forward pass
        self._named = dict(network.named_parameters())
        self._names = {p: name for name, p in self._named.items()}
        # parameter that replaces a parameter of the model -> function that computes its value
        self.computed: dict[nn.Parameter, Callable[[], Tensor]] = {}

    def full(self, p: nn.Parameter) -> Tensor:
        """Returns a full weight; the first process calls this. Parameters that do not belong to the model were created
        by the export, and are complete."""
        if p not in self._names:
            return self.computed[p]() if p in self.computed else p.data
        return self._gathered(self._send_name(self._names[p]))

    def dtype_of(self, p: nn.Parameter) -> torch.dtype:
        return self.shard(p).dtype if p in self._names else p.dtype

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Yields True in the process that writes. The other processes take part in its gathers until the writer has
        finished; if the writer fails, they fail with the same error."""
        with fail_together(self.ranks):
            if self.ranks.rank == 0:
                try:
                    yield True
                finally:
                    self._send_name(None)
            else:
                while (name := self._send_name(None)) is not None:
                    self._gathered(name)
                yield False

    def _send_name(self, name: str | None) -> str | None:
        """Returns the next parameter's name, which the first process sends; the other processes wait without a time
        limit while it writes."""
        with self.ranks.leave_after_rank_0("write the model"):
            pass
        return self.ranks.broadcast(name)

    def _gathered(self, name: str) -> Tensor | None:
        p = self._named[name]
        return self.ranks.gathered(p, self.shard(p))


class ModelFolder(NamedTuple):
    """A folder to write: its path, and its content except the weights."""

    path: Path
    tokenizer: PreTrainedTokenizerBase
    dtype: str | None = None  # dtype of the written weights, such as bfloat16; None: unchanged
    card: str = ""  # README.md

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Yields a folder for the weights, which is renamed to `path` once it is complete."""
        with atomic_write(self.path) as draft:
            draft.mkdir(exist_ok=True)
            yield draft
            self.tokenizer.save_pretrained(draft)
            old_spelling.rewrite_tokenizer(draft, self.tokenizer)
            (draft / CARD).write_text(self.card, encoding="utf-8")


def export(network: PreTrainedModel, folder: ModelFolder, weights: Weights | None = None) -> None:
    """Writes weights (safetensors), configuration and tokenizer, atomically.

    Args:
        weights: reads the model's weights; None: the parameters are at full precision.

    Raises:
        OverflowError: a weight is out of range of the folder's dtype.
    """
    weights, dtype = weights or Weights(network), folder.dtype
    rounding = Rounding(getattr(torch, dtype)) if dtype else None
    with folder.draft() as draft:
        tensors = network.state_dict() | _laters(network, rounding, weights)
        network.save_pretrained(draft, state_dict=_once(network, tensors), max_shard_size=FILE_BYTES)
        # transformers has written the dtype of the parameters in memory
        network.config.dtype = dtype or str(weights.dtype_of(next(network.parameters()))).removeprefix("torch.")
        network.config.save_pretrained(draft)
        old_spelling.rewrite_config(draft, _is_tied(network))
    if rounding:
        rounding.tell()


def _is_tied(network: PreTrainedModel) -> bool | None:
    """Returns whether embedding and output layer share their weight, whatever the configuration says; None if the model
    has no output layer."""
    head = network.get_output_embeddings()
    return None if head is None else head.weight is network.get_input_embeddings().weight


def _laters(network: nn.Module, rounding: Rounding | None, weights: Weights) -> dict[str, Later]:
    """Maps each parameter name, tied names included, to a lazy tensor that is computed when its file is written."""

    def later(name: str, p: nn.Parameter) -> Later:
        if rounding is None:
            return Later.computed_by(lambda: weights.full(p).cpu(), p.shape, weights.dtype_of(p))
        return Later.computed_by(lambda: rounding(name, weights.full(p), "cpu"), p.shape, rounding.dtype)

    return {name: later(name, p) for name, p in network.named_parameters(remove_duplicate=False)}


def _once(network: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors without names that transformers ties to another name when it loads the folder. transformers
    would compare both tensors, and so compute them."""
    named = dict(network.named_parameters(remove_duplicate=False))
    tied = network.all_tied_weights_keys.items()
    ties = {name for name, target in tied if name in named and named[name] is named.get(target)}
    return {name: tensor for name, tensor in tensors.items() if name not in ties}
