"""From a library's optimizer class to the optimizer of a model: which parameters decay, and how its state comes back.

An optimizer's yaml names the library's class and its arguments. What every optimizer here has in common is added in
this file, once: groups of parameters by role, state that is restored in the dtype in which it was saved, and, for
8-bit optimizers, embeddings whose state keeps 32 bits.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer


class MakeOptimizer:
    """model -> optimizer.

    Args:
        make: parameter groups -> optimizer, a partial of the class that the yaml names.
        embedding_bits: of the state of embeddings, in an 8-bit optimizer of bitsandbytes; None: not such an optimizer.
    """

    def __init__(self, make: Callable[[list[dict]], Optimizer], embedding_bits: int | None = None) -> None:
        self.make, self.embedding_bits = make, embedding_bits

    def __call__(self, model: nn.Module) -> Optimizer:
        optimizer = self.make(parameter_groups(model))
        if self.embedding_bits is not None:
            _hold_embeddings_in(optimizer, self.embedding_bits)
        _restore_in_saved_dtypes(optimizer)
        return optimizer

    @property
    def name(self) -> str:
        """Of the class, to tell whose state a checkpoint holds."""
        return getattr(self.make, "func", self.make).__qualname__


def parameter_groups(model: nn.Module) -> list[dict]:
    """Trainable parameters by role: matrices and embeddings, which decay; vectors (norms, biases), which never do.

    A tied head is an embedding; a head of its own is one too: its rows belong to tokens.
    """
    by_token = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    by_token |= {id(head.weight)} if head is not None else set()
    groups = {
        "matrix": {"params": [], "role": "matrix"},
        "embedding": {"params": [], "role": "embedding"},
        "vector": {"params": [], "role": "vector", "weight_decay": 0.0},
    }
    for p in model.parameters():
        if p.requires_grad:
            role = "vector" if p.dim() < 2 else "embedding" if id(p) in by_token else "matrix"
            groups[role]["params"].append(p)
    return [group for group in groups.values() if group["params"]]


def _hold_embeddings_in(optimizer: Optimizer, bits: int) -> None:
    """bitsandbytes' own overrides are kept in a global table by id(parameter), which the next job's may share."""
    ours = optimizer.get_config

    def get_config(gindex: int, pindex: int, group: dict) -> dict:
        return ours(gindex, pindex, group) | ({"optim_bits": bits} if group["role"] == "embedding" else {})

    optimizer.get_config = get_config


def _restore_in_saved_dtypes(optimizer: Optimizer) -> None:
    """torch casts restored state to the parameter's dtype: fp32 moments of a 16-bit weight would lose half their bits.

    (bitsandbytes restores its own state, as it was saved; torchao's issue 3314 is of this kind.)
    """
    saved: dict = {}

    def before(_, state_dict: dict) -> None:
        saved.update(state_dict["state"])

    def after(optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, state in saved.items():
            for key, value in state.items():
                restored = optimizer.state[parameters[index]]
                if isinstance(value, Tensor) and restored[key].dtype != value.dtype:
                    restored[key] = value.to(restored[key].device, copy=True)
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
