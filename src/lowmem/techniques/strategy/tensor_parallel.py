"""Tensor parallelism: the ranks of a group hold a part of each matrix and compute one micro-batch together.

The first matrix of a pair is divided along what leaves it (attention by heads, an MLP by its width), the second along
what enters it; between the two each rank works on its own part alone. What a block adds to the hidden states is a sum
over the ranks, and so is the gradient of what enters it: these two sums are what it costs, for each micro-batch and
block. Embedding and head are divided along the vocabulary: the first is one more sum, the second gathers its logits,
but for a loss in tiles, which reads each rank's own. Weights, gradients and state of all these are 1/N on each of N
ranks, and so is what lies between a pair. Whole on each are norms, the biases behind a sum, the hidden states, and of
a vocabulary that does not divide (GPT-2's 50257 tokens) embedding and head. All ranks draw the same dropout, each for
its own heads.
Source: Shoeybi et al. 2019, arXiv 1909.08053; the mesh, the divided parameters and the sums are torch's DTensor.

Which layer is divided how says the plan that transformers' model brings; GPT-2, which brings none, has it here.
Products are of plain tensors, made from each rank's own part: whoever watches operators (memory, what is computed
again) sees those of any other run, and a layer of GPT-2, whose matrix lies the other way round, stays what it is.
"""

import logging
import re

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.system.errors import Refused
from lowmem.techniques.strategy import load_in_parts
from lowmem.techniques.strategy.divided_layers import (
    WHOLE,
    Group,
    Layout,
    Layouts,
    divide_columns,
    divide_embedding,
    divide_head,
    divide_rows,
)
from lowmem.techniques.strategy.several import Divided

log = logging.getLogger(__name__)

QKV, FUSED = "colwise_qkv", 3  # query, key and value in one matrix
# By the model's type, of those that bring no plan.
PLANS = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": QKV,
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
}
SUMMED = "replicated_with_grad_allreduce"  # a norm of each head: every rank has the gradient of its own heads
COLUMNS = ("colwise", QKV, "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
SMALL = {"colwise": "lora_B", QKV: "lora_B", "rowwise": "lora_A"}  # of x A B, what has the part of a layer
SAME = 1e-3  # of a gradient's norm: that of other heads is another one, and a card's order of sums is no such matter
NOISE = 1e-6  # of the largest norm: what is no more is nothing but roundings
NUMBER = r"(?<=\.)\d+(?=\.|$)"  # of a block, for which a plan writes a star


def divide(network: PreTrainedModel, group: Group) -> dict[str, Layout]:
    """Leave each rank its part of the matrices: parameters become DTensors, and their layers compute with the part.

    Args:
        network: whole and the same on every rank, with its adapter, if any.

    Returns:
        Name -> layout, of each parameter that is not `WHOLE`.

    Raises:
        Refused: a model without a plan, or with layers that are not divided here, or whose numbers do not divide.
    """
    styles = styles_of(network)
    _check_numbers(network, styles, group.size)
    layouts = _divide_ends(network, group)
    for name, style in styles.items():
        if style == SUMMED:
            layouts |= {p: Layout(summed=True) for p in network.get_submodule(name).parameters()}
            continue
        layouts |= _divide(network.get_submodule(name), style, group)
        if style == QKV:
            network.get_submodule(name.rpartition(".")[0]).split_size //= group.size
    return {name: layouts[p] for name, p in network.named_parameters() if p in layouts}


def styles_of(network: PreTrainedModel) -> dict[str, str]:
    """Module -> style, of all that are divided or whose gradient is summed: neither the embedding nor the head.

    Raises:
        Refused: a model without a plan, or with layers that are not divided here.
    """
    plan = PLANS.get(network.config.model_type) or network.tp_plan or {}
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    modules = {name: module for name, module in network.named_modules() if not any(module is end for end in ends)}
    named = (*modules, *(name for name, _ in network.named_parameters()))  # experts in one tensor are no module
    styles = {name: plan[pattern] for name in named if (pattern := re.sub(NUMBER, "*", name)) in plan}
    if not {*styles.values()} & {*ROWS}:
        raise _refused(network, "it brings no plan of which layers are divided and how")
    for name, style in styles.items():
        if style not in (*COLUMNS, *ROWS, SUMMED):
            raise _refused(network, f"{name} is divided in a way that is not known here ({style})")
        if style != SUMMED and name not in modules:
            raise _refused(network, f"{name} is divided, which is no layer")
        if style != SUMMED:
            _check_kind(network, name, modules[name])
    return styles


def _check_kind(network: nn.Module, name: str, module: nn.Module) -> None:
    layer = _base(module)
    if type(layer) not in (nn.Linear, Conv1D):
        raise _refused(network, f"{name} is a {type(layer).__name__}, and linear layers are divided")
    if getattr(module, "lora_magnitude_vector", None):
        raise _refused(network, "DoRA measures rows of whole matrices")


def _check_numbers(network: nn.Module, styles: dict[str, str], size: int) -> None:
    """Heads and widths: each rank has as many as any other."""
    grouped = dist.is_initialized() and size < dist.get_world_size()  # then devices= are not what has to be another
    counts = {name: _counted(network, name, style) for name, style in styles.items() if style != SUMMED}
    for name, (count, what) in counts.items():
        if count % size:
            fits = [n for n in range(2, size) if not any(number % n for number, _ in counts.values())]
            groups = [n for n in fits if size % n == 0]
            instead = f"Type devices={fits[-1]}" if fits and not grouped else "Type another strategy=, such as fsdp"
            raise Refused(
                f"{type(network).__name__} cannot be divided over {size} ranks: {name} has {count} {what}. {instead}"
                + (f", or strategy=fsdp_tensor_parallel strategy.tensor_parallel_size={groups[-1]}." if groups else ".")
            )


def _counted(network: nn.Module, name: str, style: str) -> tuple[int, str]:
    layer, attention = _base(network.get_submodule(name)), network.get_submodule(name.rpartition(".")[0])
    out, entering = reversed(layer.weight.shape) if type(layer) is Conv1D else layer.weight.shape
    if style in ROWS:
        return entering, "columns"
    head = getattr(attention, "head_dim", getattr(attention, "head_size", None)) if style in ("colwise", QKV) else None
    if not head:
        return out, "rows"
    heads = getattr(network.config.get_text_config(decoder=True), "num_attention_heads", None)
    return out // head // (FUSED if style == QKV or out == FUSED * head * (heads or 0) else 1), "heads"


def _refused(network: nn.Module, why: str) -> Refused:
    return Refused(
        f"{type(network).__name__} cannot be divided by layers: {why}. Type another strategy=, such as fsdp."
    )


def _divide(module: nn.Module, style: str, group: Group) -> Layouts:
    """A layer, and of the small matrices beside it, x A B, the one that meets what is divided."""
    layer, beside = _base(module), getattr(module, SMALL.get(style, ""), {}).values()
    if style in ROWS:
        layouts = divide_rows(layer, group, split=style == "rowwise_split_input")
        for small in beside:
            layouts |= divide_rows(small, group)
        return layouts
    fused = FUSED if style == QKV else 1
    layouts = divide_columns(layer, group, fused, gathered=style == "colwise_gather_output")
    for small in beside:
        layouts |= divide_columns(small, group, fused)
    return layouts


def _divide_ends(network: PreTrainedModel, group: Group) -> Layouts:
    """Embedding and head along the vocabulary, where it divides and both are torch's own; else they stay whole."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and type(head) is nn.Linear and head.bias is None
    if not plain or len(embedding.weight) % group.size or len(head.weight) % group.size:
        log.info(f"strategy: embedding and head are whole on each device: not of {group.size} equal parts of tokens.")
        return {}
    tied = embedding.weight is head.weight
    layouts = divide_embedding(embedding, group) | divide_head(head, group)
    if tied:
        embedding.weight = head.weight
    return layouts


def _base(module: nn.Module) -> nn.Module:
    """The model's own layer where an adapter is around it."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


class TensorParallel(Divided):
    """All ranks are one group, and read the same rows. Those that are several groups derive from it."""

    in_numbers = False
    tensor_parallel_size: int | None = None  # ranks of a group; None: all

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600) -> None:
        super().__init__(device, devices, timeout)
        self.data_size = self.data_ranks(self.size, self.tensor_parallel_size)
        self.mesh = self.meshed(timeout, data=self.data_size, tensor=self.size // self.data_size)
        self.data_rank, self.group = self.mesh["data"].get_local_rank(), Group(self.mesh["tensor"])
        self.factor, self.data_group = float(self.data_size), self.mesh["data"].get_group()
        self._layouts: dict[nn.Parameter, Layout] = {}
        self._compared = False  # whether what all ranks hold has had the same gradient on them

    @staticmethod
    def data_ranks(devices: int, tensor_parallel_size: int | None = None, **_: object) -> int:
        size = devices if tensor_parallel_size is None else tensor_parallel_size
        if size < 1 or devices % size:
            raise Refused(
                f"strategy.tensor_parallel_size={size}: devices={devices} cannot be divided into groups of so many. "
                f"Type devices={max(size, 1) * 2}, or a size that divides {devices}."
            )
        return devices // size

    def shard(self, module: LightningModule) -> None:
        load_in_parts.shard_and_send(module.model, self, lambda: self._lay_out(module), self.place)

    def _lay_out(self, module: LightningModule) -> None:
        layouts = self.laid_out(module)
        self._layouts = {p: layouts.get(name, WHOLE) for name, p in module.model.named_parameters()}
        self._names = {p: name for name, p in module.model.named_parameters()}

    def laid_out(self, module: LightningModule) -> dict[str, Layout]:
        """Returns: as `divide`."""
        return divide(module.model, self.group)

    def gather_gradients(self) -> None:
        """Gradients that are summands are added over the group: once for all of them, and for a whole window."""
        super().gather_gradients()
        held = {p: self.local(p).grad for p, layout in self._layouts.items() if layout.dim is None}
        held = {p: gradient for p, gradient in held.items() if gradient is not None}
        if gradients := [gradient for p, gradient in held.items() if self._layouts[p].summed]:
            together = self.group.all_reduced(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        if held and not self._compared:
            self._compare(held)

    def _compare(self, held: dict[nn.Parameter, Tensor]) -> None:
        """Before the first step: a plan that leaves out a sum would let the ranks' weights part without a word.

        Raises:
            Refused
        """
        norms = torch.stack([gradient.float().norm() for gradient in held.values()])
        least, most = self.group.all_reduced(torch.stack([-norms, norms]), dist.ReduceOp.MAX)
        self._compared = bool(most.isfinite().all())  # else a loss scale is still too large
        wrong = most + least > SAME * most + NOISE * most.max()
        for p, differs in zip(held, wrong.tolist(), strict=True):
            if differs:
                raise Refused(
                    f"strategy: {self._names[p]} has another gradient on each device of a group: the model's plan "
                    "leaves out that they are added. Type another strategy=, such as fsdp."
                )

    def as_dtensor(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        """What lies in another order than in the model's own is gathered for it."""
        layout, placed = self._layouts[p], super().as_dtensor(p, shard)
        if layout.fused == 1:
            return placed
        return layout.joined([*_in_full(placed).chunk(self.group.size, layout.dim)])

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        placed = self.as_dtensor(p, shard)
        return (_in_full(placed) if isinstance(placed, DTensor) else placed).cpu()

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        return self._layouts[p].shard_of(full, self.group.rank, self.group.size)


def _in_full(divided: DTensor) -> Tensor:
    """Gathers over one dimension of the mesh after the other: torch warns if it is asked for all at once."""
    placements = [*divided.placements]
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        divided = divided.redistribute(placements=placements)
    return divided.to_local()
