"""Tensor parallelism: the ranks of a group compute each micro-batch together, each with its shards of the matrices.

    attention    query, key, value: sharded by heads (columns)    output: sharded by rows    -> all-reduce
    MLP          up, gate: sharded by width (columns)             down: sharded by rows      -> all-reduce
    embedding    sharded by the vocabulary                                                   -> all-reduce
    head         sharded by the vocabulary                                                   -> all-gather of logits

"Columns" and "rows" refer to a matrix (in, out). Each of the first two lines describes a pair: layers that are sharded
by columns, followed by a layer that is sharded by rows. Within a pair, each rank computes only its own heads or
columns. In backward, one all-reduce per pair sums the gradient of the pair's input. A loss that reads the head in tiles
needs no all-gather: each rank computes with its own part of the logits, and the ranks all-reduce statistics of each
token's logits.

Each of the N ranks of a group stores 1/N of the sharded weights, of their gradients and optimizer state (less with
`fsdp_tensor_parallel.py`), and of the activations within a pair. Norms, hidden states, and biases that are added after
an all-reduce are replicated on all ranks of the group. Embedding and head are replicated too if they cannot be sharded
(`_divide_ends`). For example, GPT-2's vocabulary of 50257 = 29 x 1733 tokens is not divisible by 2, 4 or 8. The ranks
of a group have equal random states, so replicated tensors get equal dropout masks. In attention, each rank draws only
the masks of its own heads. Source: Shoeybi et al. 2019, arXiv 1909.08053; torch's DTensor provides mesh, sharded
parameters and collectives.

The tensor-parallel plan of a transformers model (`tp_plan`) maps names of layers to sharding styles. transformers has
no plan for GPT-2, so this module contains one. torch's `parallelize_module` applies the plan, with the styles of
`parallel_styles.py`.
"""

import logging
import re

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.system.errors import Refused
from lowmem.techniques.strategy import load_in_parts
from lowmem.techniques.strategy.parallel_styles import Colwise, Embedding, Group, HeadShard, Rowwise, swapped
from lowmem.techniques.strategy.several import Divided, in_full

log = logging.getLogger(__name__)

QKV, FUSED = "colwise_qkv", 3  # the style of a layer whose weight joins FUSED matrices: query, key and value
# Plans by model type, for models without a plan in transformers
PLANS = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": QKV,
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
}
SUMMED = "replicated_with_grad_allreduce"  # for example q_norm: a rank has the gradient of its own heads only
COLUMNS = ("colwise", QKV, "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
# Maps the style of a layer to the LoRA matrix (A or B in x A B) that is sharded like the layer. The other LoRA matrix
# is replicated, and so are both LoRA matrices of a layer whose style is not listed.
SMALL = {"colwise": "lora_B", QKV: "lora_B", "rowwise": "lora_A"}
# Tolerances of `_compare`. SAME is relative to the norm of the compared gradient. Rounding causes far smaller
# differences, and a missing all-reduce far larger ones.
SAME = 1e-3
NOISE = 1e-6  # relative to the largest of the compared norms: differences below this are rounding errors
NUMBER = r"(?<=\.)\d+(?=\.|$)"  # matches the index of a block, which a plan writes as *


def divide(network: PreTrainedModel, group: Group) -> dict[str, str]:
    """Shards the matrices of a model in place: their parameters become DTensors, and the layers compute with this
    rank's shards.

    Args:
        network: the complete model with its adapter, if any. In a run it is on the meta device, with the same modules
            on all ranks.
        group: the ranks.

    Returns:
        The result of `styles_of`.

    Raises:
        Refused: the model has no plan; layers cannot be sharded; heads or widths are not divisible by the number of
            ranks.
    """
    styles = styles_of(network)
    _check_numbers(network, styles, group.size)
    _divide_ends(network, group)
    parallelize_module(network, group.mesh, _plan(network, styles, group), src_data_rank=None)
    for name in (name for name, style in styles.items() if style == QKV):
        network.get_submodule(name.rpartition(".")[0]).split_size //= group.size
    return styles


def styles_of(network: PreTrainedModel) -> dict[str, str]:
    """Returns a dict that maps names to styles: of the layers that the model's plan shards, and of modules and
    parameters with the style `SUMMED`. Excludes embedding and head, which `_divide_ends` shards.

    Raises:
        Refused: the model has no plan, or layers that cannot be sharded.
    """
    plan = PLANS.get(network.config.model_type) or network.tp_plan or {}
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    modules = {name: module for name, module in network.named_modules() if not any(module is end for end in ends)}
    named = (*modules, *(name for name, _ in network.named_parameters()))  # fused experts are parameters, not modules
    styles = {name: plan[pattern] for name in named if (pattern := re.sub(NUMBER, "*", name)) in plan}
    if not {*styles.values()} & {*ROWS}:
        raise _refused(network, "the model comes without a tensor-parallel plan (tp_plan) for its layers")
    for name, style in styles.items():
        if style not in (*COLUMNS, *ROWS, SUMMED):
            raise _refused(network, f"{name} has an unsupported sharding style ({style})")
        if style != SUMMED and name not in modules:
            raise _refused(network, f"the model's plan shards {name}, which is not a layer")
        if style != SUMMED:
            _check_kind(network, name, modules[name])
    return styles


def _check_kind(network: nn.Module, name: str, module: nn.Module) -> None:
    layer = _base(module)
    if type(layer) not in (nn.Linear, Conv1D):
        raise _refused(network, f"{name} is a {type(layer).__name__}, and only linear layers can be sharded")
    if getattr(module, "lora_magnitude_vector", None):
        raise _refused(network, "DoRA needs the norms of full rows of each matrix")


def _check_numbers(network: nn.Module, styles: dict[str, str], size: int) -> None:
    """Checks that heads and widths are divisible by the number of ranks. Raises: Refused."""
    # True: the ranks are divided into groups, so the message must not propose another number of devices
    grouped = dist.is_initialized() and size < dist.get_world_size()
    counts = {name: _counted(network, name, style) for name, style in styles.items() if style != SUMMED}
    for name, (count, unit) in counts.items():
        if count % size:
            fits = [n for n in range(2, size) if not any(number % n for number, _ in counts.values())]
            groups = [n for n in fits if size % n == 0]
            instead = f"Type devices={fits[-1]}" if fits and not grouped else "Type another strategy=, such as fsdp"
            raise Refused(
                f"strategy: {type(network).__name__} cannot be sharded over {size} ranks: {name} has {count} {unit}, "
                f"not a multiple of {size}. {instead}"
                + (f", or strategy=fsdp_tensor_parallel strategy.tensor_parallel_size={groups[-1]}." if groups else ".")
            )


def _counted(network: nn.Module, name: str, style: str) -> tuple[int, str]:
    """Returns the number of units that must be divisible by the number of ranks, and the name of the unit: heads, or
    rows or columns. Here, and in the error message, these are the rows and columns of a matrix (out, in)."""
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
        f"strategy: tensor parallelism cannot shard {type(network).__name__}: {why}. Type another strategy=, such as "
        "fsdp."
    )


def _plan(network: nn.Module, styles: dict[str, str], group: Group) -> dict[str, ParallelStyle]:
    """Returns a dict from module names to style objects, for `parallelize_module`. Its entries are the layers of
    `styles` that are sharded, and the sharded matrices of their adapters (see `SMALL`)."""
    made = {
        "colwise": Colwise(group),
        QKV: Colwise(group, FUSED),
        "colwise_gather_output": Colwise(group, gathered=True),
        "rowwise": Rowwise(group),
        "rowwise_split_input": Rowwise(group, split=True),
    }
    plan = {}
    for name, style in ((name, style) for name, style in styles.items() if style != SUMMED):
        module = network.get_submodule(name)
        adapters = (f"{name}.{SMALL[style]}.{adapter}" for adapter in getattr(module, SMALL.get(style, ""), {}))
        layer = f"{name}.base_layer" if hasattr(module, "get_base_layer") else name
        plan |= dict.fromkeys((layer, *adapters), made[style])
    return plan


def _divide_ends(network: PreTrainedModel, group: Group) -> None:
    """Shards embedding and head along the vocabulary, in place. Both stay replicated if the rows of either are not
    divisible by the number of ranks, if the embedding is not an nn.Embedding, if the head is not an nn.Linear, or if
    the head has a bias."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and type(head) is nn.Linear and head.bias is None
    if not plain or len(embedding.weight) % group.size or len(head.weight) % group.size:
        log.info(
            "strategy: embedding and head are not sharded, so each device holds both in full: their vocabulary sizes "
            f"are not multiples of {group.size}, they are not plain torch modules, or the head has a bias."
        )
        return
    tied = embedding.weight is head.weight
    parallelize_module(embedding, group.mesh, Embedding(group), src_data_rank=None)
    parallelize_module(head, group.mesh, Colwise(group, gathered=True), src_data_rank=None)
    head.source = HeadShard(head, group)  # read by losses that compute the logits in tiles
    if tied:
        embedding.weight = head.weight


def _base(module: nn.Module) -> nn.Module:
    """Returns the base layer if an adapter wraps the module, otherwise the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


class TensorParallel(Divided):
    """Tensor parallelism over a single group: all ranks read the same rows. `FullyShardTensorParallel`, which has
    several groups, derives from this class."""

    widens = shards_matrices = adds_in_blocks = True
    tensor_parallel_size: int | None = None  # number of ranks in a group; None: all ranks

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600) -> None:
        super().__init__(device, devices, timeout)
        self.data_size = self.data_ranks(self.size, self.tensor_parallel_size)
        self.mesh = self.meshed(timeout, data=self.data_size, tensor=self.size // self.data_size)
        self.data_rank, self.group = self.mesh["data"].get_local_rank(), Group(self.mesh["tensor"])
        self.factor, self.data_group = float(self.data_size), self.mesh["data"].get_group()
        self._styles: dict[nn.Parameter, str | None] = {}  # parameter -> style of its module; None: not in the plan
        self._compared = False  # True: `_compare` has compared finite gradients

    @staticmethod
    def data_ranks(devices: int, tensor_parallel_size: int | None = None, **_: object) -> int:
        size = devices if tensor_parallel_size is None else tensor_parallel_size
        if size < 1 or devices % size:
            raise Refused(
                f"strategy.tensor_parallel_size={size}: devices={devices} cannot be divided into groups of {size}. "
                f"Type devices={max(size, 1) * 2}, or a size that divides {devices}."
            )
        return devices // size

    def shard(self, module: LightningModule) -> None:
        load_in_parts.shard_and_send(module.model, self, lambda: self._lay_out(module), self.place)

    def _lay_out(self, module: LightningModule) -> None:
        styles = self.laid_out(module)
        for name, p in module.model.named_parameters():
            self._styles[p] = next((style for layer, style in styles.items() if name.startswith(f"{layer}.")), None)
        self._names = {p: name for name, p in module.model.named_parameters()}

    def laid_out(self, module: LightningModule) -> dict[str, str]:
        """Shards the model in place. Returns: the result of `divide`."""
        return divide(module.model, self.group)

    def _dim(self, p: nn.Parameter) -> int | None:
        """Returns the dimension along which tensor parallelism shards a parameter; None for replicated parameters."""
        ours = isinstance(p, DTensor) and p.device_mesh.mesh_dim_names[-1:] == self.group.mesh.mesh_dim_names
        return p.placements[-1].dim if ours else None

    def _fused_dim(self, p: nn.Parameter) -> int | None:
        """Returns the sharded dimension of a parameter that concatenates query, key and value; None for other
        parameters."""
        return self._dim(p) if self._styles[p] == QKV else None

    def gather_gradients(self) -> None:
        """Also all-reduces the gradients of parameters with the style `SUMMED`, because autograd sums them only over
        the rank's own heads. Raises: Refused: see `_compare`."""
        super().gather_gradients()
        replicated = {p: self.local(p).grad for p in self._styles if self._dim(p) is None}
        replicated = {p: gradient for p, gradient in replicated.items() if gradient is not None}
        if gradients := [gradient for p, gradient in replicated.items() if self._styles[p] == SUMMED]:
            reduced = self.group.all_reduced(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, total in zip(gradients, reduced.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        if replicated and not self._compared:
            self._compare(replicated)

    def _compare(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Compares the gradient norms of replicated parameters between the ranks of a group, in the first windows,
        until all norms of a window are finite. If a plan lacked an all-reduce, the copies of a replicated weight would
        silently diverge.

        Raises:
            Refused: the norms differ.
        """
        norms = torch.stack([gradient.float().norm() for gradient in gradients.values()])
        least, most = self.group.all_reduced(torch.stack([-norms, norms]), dist.ReduceOp.MAX)
        self._compared = bool(most.isfinite().all())  # False, for example, if the loss scale is too large
        wrong = most + least > SAME * most + NOISE * most.max()
        for p, differs in zip(gradients, wrong.tolist(), strict=True):
            if differs:
                raise Refused(
                    f"strategy: the gradient of {self._names[p]} differs between the devices of a group: the model's "
                    "tensor-parallel plan lacks an all-reduce for it. Type another strategy=, such as fsdp."
                )

    def as_dtensor(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        """Returns a shard as a DTensor, like `Divided.as_dtensor`. For a fused matrix, returns the full tensor instead,
        because the concatenated shards are not in the order of the matrix."""
        placed, dim = super().as_dtensor(p, shard), self._fused_dim(p)
        return placed if dim is None else swapped(in_full(placed), dim, self.group.size, FUSED)

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        dim = self._fused_dim(p)
        return super().shard_of(p, full if dim is None else swapped(full, dim, FUSED, self.group.size))
