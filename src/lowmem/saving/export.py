"""Writes a trained model as a folder in Hugging Face's format. The weight files are written one after the other, so a
dense model needs no second copy in memory.

transformers writes the folder from lazy tensors. A lazy tensor has a shape and a dtype, and its values are computed
when transformers writes the file with this tensor. If transformers computes with a lazy tensor earlier, for example to
split fused experts, the values are computed at that time. In addition to the model, the export therefore needs memory
for one file, and for a mixture of experts also for all experts.

If the model is sharded, the first process writes, and gathers one weight at a time from all processes (`Weights`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem.model.magnitude import Rounding
from lowmem.saving import old_spelling
from lowmem.system.atomic_files import atomic_write
from lowmem.system.fail_together import fail_together
from lowmem.system.torch_private import tree_map_only
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice

CARD = "README.md"  # the hub shows it as the model card
FILE_BYTES = 2 * 10**9  # maximum bytes per file, unless a single tensor is larger
_SAYS = {  # functions that do not need the values of a lazy tensor
    *(Tensor.device.__get__, Tensor.dtype.__get__, Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement),
    *(Tensor.element_size, Tensor.untyped_storage, Tensor.is_floating_point),
}


class Later(Tensor):
    """A lazy tensor, whose values are computed when an operation needs them. The values are not stored, so each
    operation that needs the values computes them again."""

    compute: Callable[[], Tensor]  # returns the values

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
    """Reads a model's weights in full precision. If the model is sharded, the first process gathers full weights into
    host memory, one by one; the other processes take part in each gather within `writing`.

    Args:
        network: the model.
        shard: returns this process's shard of a parameter in full precision. If the process has no shard of the
            parameter, only the shape and dtype of the result are used.
        ranks: the strategy that shards the model.
    """

    def __init__(
        self,
        network: nn.Module,
        shard: Callable[[nn.Parameter], Tensor] = lambda p: p.data,
        ranks: OneDevice = ONE_DEVICE,
    ) -> None:
        self.shard, self.ranks = shard, ranks
        network.state_dict()  # calls a hook of FSDP, which frees the full weights that a forward pass has gathered
        self._named = dict(network.named_parameters())
        self._names = {p: name for name, p in self._named.items()}
        # Maps each parameter that is not in the trained model to the function that computes its value. Filled by
        # `export_adapter`, which replaces adapted and 4-bit layers of a sharded model with layers that have such
        # parameters.
        self.computed: dict[nn.Parameter, Callable[[], Tensor]] = {}

    def full(self, p: nn.Parameter) -> Tensor:
        """Returns a full weight, in host memory if it is a weight of the trained model. For a parameter that the export
        has added to the model, returns the computed value or, if there is none, the parameter's own data. Only the
        first process calls this method."""
        if p not in self._names:
            return self.computed[p]() if p in self.computed else p.data
        return self._gathered(self._send_name(self._names[p]))

    def dtype_of(self, p: nn.Parameter) -> torch.dtype:
        return self.shard(p).dtype if p in self._names else p.dtype

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Yields True in the first process, which writes. In the other processes, takes part in the gathers until the
        first process has finished, then yields False. All processes must enter this context. If a process fails, all
        processes raise an error (see `fail_together`)."""
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
        """Sends the name of the next parameter from the first process to all processes, and returns the name; None: the
        first process has finished. The other processes wait without a time limit, since the first process may be
        writing a file. These processes ignore the argument `name`."""
        with self.ranks.leave_after_rank_0("write the model"):
            pass
        return self.ranks.broadcast(name)

    def _gathered(self, name: str) -> Tensor | None:
        p = self._named[name]
        return self.ranks.gathered(p, self.shard(p))


class ModelFolder(NamedTuple):
    """The folder to write: its path, the tokenizer, the dtype of the weights, and the content of README.md."""

    path: Path
    tokenizer: PreTrainedTokenizerBase
    dtype: str | None = None  # dtype of the written weights, such as bfloat16; None: full precision
    card: str = ""  # content of README.md

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Yields a draft folder, into which the caller writes weights and configuration. Then adds the tokenizer and
        README.md, and renames the draft to `path`."""
        with atomic_write(self.path) as draft:
            draft.mkdir(exist_ok=True)
            yield draft
            self.tokenizer.save_pretrained(draft)
            old_spelling.rewrite_tokenizer(draft, self.tokenizer)
            (draft / CARD).write_text(self.card, encoding="utf-8")


def export(network: PreTrainedModel, folder: ModelFolder, weights: Weights | None = None) -> None:
    """Writes weights (safetensors), configuration, tokenizer and README.md, atomically. Also sets the dtype in the
    model's own configuration.

    Args:
        network: the model.
        folder: the folder to write.
        weights: reads the model's weights; None if the parameters themselves are in full precision.

    Raises:
        OverflowError: a weight is out of range of the folder's dtype.
        OSError: the folder cannot be written.
    """
    weights, dtype = weights or Weights(network), folder.dtype
    rounding = Rounding(getattr(torch, dtype)) if dtype else None
    with folder.draft() as draft:
        tensors = network.state_dict() | _laters(network, rounding, weights)
        # Published models may have contradictory generation settings, such as a temperature without do_sample.
        with patch.object(GenerationConfig, "validate"):
            network.save_pretrained(draft, state_dict=_once(network, tensors), max_shard_size=FILE_BYTES)
        # write the configuration again, since transformers has written the dtype of the parameters in memory
        network.config.dtype = dtype or str(weights.dtype_of(next(network.parameters()))).removeprefix("torch.")
        network.config.save_pretrained(draft)
        old_spelling.rewrite_config(draft, _is_tied(network))
    if rounding:
        rounding.tell()


def _is_tied(network: PreTrainedModel) -> bool | None:
    """Returns True if embedding and output layer share their weight, even if the configuration says otherwise. Returns
    None if the model has no output layer."""
    head = network.get_output_embeddings()
    return None if head is None else head.weight is network.get_input_embeddings().weight


def _laters(network: nn.Module, rounding: Rounding | None, weights: Weights) -> dict[str, Later]:
    """Returns a dict from name to lazy tensor, for all parameters. A tied parameter has an entry for each of its
    names."""

    def later(name: str, p: nn.Parameter) -> Later:
        if rounding is None:
            return Later.computed_by(lambda: weights.full(p).cpu(), p.shape, weights.dtype_of(p))
        return Later.computed_by(lambda: rounding(name, weights.full(p), "cpu"), p.shape, rounding.dtype)

    return {name: later(name, p) for name, p in network.named_parameters(remove_duplicate=False)}


def _once(network: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors without the additional names of tied weights. transformers restores these names when it loads
    the folder. If the names were kept, transformers would compare the tied tensors, and would therefore compute their
    values."""
    named = dict(network.named_parameters(remove_duplicate=False))
    tied = network.all_tied_weights_keys.items()
    ties = {name for name, target in tied if name in named and named[name] is named.get(target)}
    return {name: tensor for name, tensor in tensors.items() if name not in ties}
