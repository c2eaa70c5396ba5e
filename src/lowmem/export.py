"""A trained model as a folder in Hugging Face's format, written shard by shard: never a second model in memory.

transformers writes it, from tensors that are made when their shard is written. Each says its shape and dtype before;
where something is computed with one, as with the experts of a mixture, which files hold apart, it is made at once.
So the peak over the model is one shard, and of a mixture its experts.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem.aside import aside
from lowmem.internals import tree_map_only
from lowmem.stable_embedding import folded

CARD = "README.md"  # what the hub shows of a model
SHARD = "2GB"  # or one tensor, where that is larger
_SAYS = {  # what is asked of a tensor that need not be there
    *(Tensor.device.__get__, Tensor.dtype.__get__, Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement),
    *(Tensor.element_size, Tensor.untyped_storage, Tensor.is_floating_point),
}


class Later(Tensor):
    """A tensor that is made when something is done with it."""

    made: Callable[[], Tensor]

    @classmethod
    def of(cls, made: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> "Later":
        later = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        later.made = made
        return later

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in _SAYS:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(cls, lambda later: later.made(), (args, kwargs or {}))
        return func(*args, **kwargs)


def export(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: str | None = None,
    card: str = "",
    whole: Callable[[nn.Parameter], Tensor] = lambda p: p.data,
) -> None:
    """Weights (safetensors), configuration and tokenizer. Whole or not at all.

    Args:
        dtype: of the written weights, such as bfloat16; None: as they are.
        card: README.md.
        whole: what a parameter is at full precision.
    """
    with aside(folder) as draft, folded(network, whole):
        held = network.state_dict() | _laters(network, dtype, whole)
        network.save_pretrained(draft, state_dict=_once(network, held), max_shard_size=SHARD)
        # transformers says the dtype of the parameters as they are
        network.config.dtype = dtype or str(whole(next(network.parameters())).dtype).removeprefix("torch.")
        network.config.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / CARD).write_text(card)


def _laters(network: nn.Module, dtype: str | None, whole: Callable[[nn.Parameter], Tensor]) -> dict[str, Later]:
    """Of every parameter, under each of its names."""

    def later(p: nn.Parameter) -> Later:
        kind = getattr(torch, dtype) if dtype else whole(p).dtype
        return Later.of(lambda: whole(p).to("cpu", kind), p.shape, kind)

    return {name: later(p) for name, p in network.named_parameters(remove_duplicate=False)}


def _once(network: PreTrainedModel, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the names that loading ties to another one: transformers would compare what stands behind them."""
    named = dict(network.named_parameters(remove_duplicate=False))
    tied = network.all_tied_weights_keys.items()
    again = {name for name, first in tied if name in named and named[name] is named.get(first)}
    return {name: tensor for name, tensor in held.items() if name not in again}
