"""Keeps the large weights outside the blocks in host memory: the embedding's, and with loss=tiled the head's.

The host looks up an embedding: the rows of a micro-batch's tokens, B x T x H, go to the device, and their gradient
comes back to the host, which adds it to the weight's own rows (V, H) there. A head goes to the device in tiles of the
vocabulary, the next tile while one is multiplied, and each tile's gradient leaves as soon as it is complete. So the
device never holds the full weight or its gradient. If embedding and head are tied, they are one weight in host memory,
too, and its gradient is complete when the embedding's part has arrived: the two are added in the weights' own dtype, as
autograd adds them.

Whatever else an embedding's forward pass does, such as a factor, its own code does, with the rows as its weight.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple
from unittest.mock import patch
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem.memory.tracker import belongs, host_side
from lowmem.model.head_tiles import HeadSource
from lowmem.offload.copy_lanes import Lane
from lowmem.offload.host_block import HostBlock
from lowmem.offload.host_weight import HostWeight
from lowmem.offload.link import Link
from lowmem.system.errors import Refused

COLUMNS = 4096  # tokens of the vocabulary per tile, if no loss sets it


class GradientSink(NamedTuple):
    """Receives gradients that are not made at a parameter."""

    link: Link
    sum_of: Callable[[nn.Parameter], HostWeight]
    complete: Callable[[nn.Parameter], None]  # called when a micro-batch's full gradient has left for the host


class Edge(HeadSource):
    """One weight (V, H) on the host. Args: embedding: the module that looks up its rows; head: the module that
    multiplies by it; either may be None."""

    def __init__(self, weight: nn.Parameter, embedding: nn.Embedding | None, head: nn.Linear | None) -> None:
        self.weight, self.embedding, self.head = weight, embedding, head
        self.staging: Tensor | None = None  # in host memory: the rows of a micro-batch on their way to the device
        self._patches = ExitStack()
        # By micro-batch, since several may be under way: the head's gradient, in host memory until the embedding's has
        # arrived; and the rows whose gradient is still to come.
        self._of_head: dict[int, Tensor] = {}
        self._rows: dict[int, ref[nn.Parameter]] = {}

    def start(
        self, host_block: HostBlock, lane: Lane, sink: GradientSink | None, under_way: Callable[[], int] = lambda: 0
    ) -> None:
        """Begins to stand in for the weight. Args: under_way: returns the number of the micro-batch that computes."""
        self.host_block, self.lane, self.sink, self.under_way = host_block, lane, sink, under_way
        if self.embedding is not None:
            # These are stored now: the host reads them while the next lookup changes the embedding.
            padding, self._by_frequency = self.embedding.padding_idx, self.embedding.scale_grad_by_freq
            self._padding = -1 if padding is None else padding
            self.staging, self._sent = lane.staging(0), lane.mark()
            self._embed = self.embedding.forward
            self._patches.enter_context(patch.object(self.embedding, "forward", self._look_up))
        if self.head is not None:
            self._patches.enter_context(patch.object(self.head, "forward", self._multiply))
            self._patches.enter_context(patch.object(self.head, "source", self, create=True))

    def stop(self) -> None:
        self._patches.close()
        self.staging = self._sent = None
        self._of_head, self._rows = {}, {}  # what a failed pass has left behind

    # --- the embedding --------------------------------------------------------------------------------------------

    def _look_up(self, ids: Tensor) -> Tensor:
        """Looks up ids (B, T) -> (B, T, H)."""
        at = ids.flatten().cpu()  # waits for the device, which has reached the end of the previous micro-batch
        rows = nn.Parameter(self._gathered(at), torch.is_grad_enabled() and self.weight.requires_grad)
        if rows.requires_grad:
            number = self.under_way()
            if number in self._rows and self._rows[number]() is not None:
                raise Refused(
                    f"weights=streamed: this model calls its {type(self.embedding).__name__} twice in one forward "
                    "pass, and streaming would lose one of the two gradients. Type weights=resident."
                )
            self._rows[number] = ref(rows)
            rows.register_post_accumulate_grad_hook(partial(self._leave, at))
        with self._in_place_of_the_weight(rows):
            return self._embed(torch.arange(len(at), device=ids.device).view_as(ids))

    @torch.inference_mode(False)  # outside of inference mode: another thread may write into tensors that are made here
    def _gathered(self, at: Tensor) -> Tensor:
        """Copies rows of the weight, as it was last stepped, to the device. Args: at: (N,), row numbers in host
        memory."""
        self.host_block.wait_for_updates()
        self._sent.synchronize()  # the previous rows have left the staging memory
        weight = self.host_block.tensor(self.weight)
        size = len(at) * weight[0].nbytes
        if self.staging.numel() < size:
            with host_side():
                self.staging = self.lane.staging(size)
            belongs(self.staging, "other", "host")
        staged = self.staging[:size].view(weight.dtype).view(len(at), -1)
        torch.index_select(weight, 0, at, out=staged)
        rows = torch.empty_like(staged, device=self.weight.device)
        self._sent = self.lane.copy(rows, staged, self.lane.mark())
        self.lane.hold(self._sent)
        return rows

    @contextmanager
    def _in_place_of_the_weight(self, rows: nn.Parameter) -> Iterator[None]:
        padding, self.embedding.padding_idx = self.embedding.padding_idx, None  # row numbers are not token ids
        self.embedding.weight = rows
        try:
            yield
        finally:
            self.embedding.weight, self.embedding.padding_idx = self.weight, padding

    def _leave(self, at: Tensor, rows: nn.Parameter) -> None:
        gradient, rows.grad = rows.grad, None
        self._rows.pop(self.under_way(), None)
        belongs(gradient, "gradients")
        with host_side():
            landed = torch.empty(gradient.shape, dtype=gradient.dtype)
        belongs(landed, "gradients", "host")
        of_head = self._of_head.pop(self.under_way(), None)
        self.sink.link.fetch(gradient, partial(self._take_rows, at, landed, of_head))
        self.sink.complete(self.weight)

    def _take_rows(self, at: Tensor, landed: Tensor, head_gradient: Tensor | None, start: int, piece: Tensor) -> None:
        """Receives a piece of the rows' gradient (N, H) on the host. The last piece completes the weight's gradient (V,
        H)."""
        _put(landed, start, piece)
        if start + piece.numel() < landed.numel():
            return
        gradient = self.sink.sum_of(self.weight)
        with host_side(), torch.no_grad():
            rows = summed_by_token(landed, at, self._padding, self._by_frequency)
            if head_gradient is None:
                gradient.use_rows(at, rows)
            else:
                gradient.use(0, head_gradient.index_add_(0, at, rows).view(-1))

    # --- the head: a source of tiles, like `ResidentHead` ---------------------------------------------------------

    @torch.inference_mode(False)
    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first token of the vocabulary, tile (C, H)). A tile is valid until the next one is read."""
        self.host_block.wait_for_updates()
        pieces = self.host_block.tensor(self.weight).split(columns)
        slots = [torch.empty_like(pieces[0], device=self.weight.device) for _ in pieces[:2]]
        for slot in slots:
            belongs(slot, "weights")
        free = [self.lane.mark()] * len(slots)

        def fetch(number: int) -> None:
            which, piece = number % len(slots), pieces[number]
            self.host_block.last_copy = landed[which] = self.lane.copy(slots[which][: len(piece)], piece, free[which])

        landed = [*free]
        fetch(0)
        try:
            for number, piece in enumerate(pieces):
                which = number % len(slots)
                if number + 1 < len(pieces):
                    fetch(number + 1)
                self.lane.hold(landed[which])
                yield number * columns, slots[which][: len(piece)]
                free[which] = self.lane.mark()
        finally:  # a reader that stops early frees its tile, into which the next one may still be copied
            for coming in landed:
                self.lane.hold(coming)

    def start_gradient(self) -> None:
        if self.embedding is not None:
            with host_side():
                of_head = torch.empty(self.weight.shape, dtype=self.weight.dtype)
            belongs(of_head, "gradients", "host")
            self._of_head[self.under_way()] = of_head

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        gradient, before = torch.mm(d_logits.T, rows), first * rows.shape[1]
        belongs(gradient, "gradients")
        of_head = self._of_head.get(self.under_way())
        add = self.sink.sum_of(self.weight).add if of_head is None else partial(_put, of_head)
        self.sink.link.fetch(gradient, lambda start, piece: add(before + start, piece))

    def whole_gradient(self) -> None:
        """Returns nothing: the gradient is on the host."""
        if self.embedding is None:
            self.sink.complete(self.weight)

    def _multiply(self, hidden: Tensor) -> Tensor:
        """Multiplies hidden (..., H) -> (..., V), for code that wants all logits, such as sampling."""
        bias = self.head.bias
        products = [
            F.linear(hidden, tile, None if bias is None else bias[first : first + len(tile)])
            for first, tile in self.tiles(COLUMNS)
        ]
        return torch.cat(products, dim=-1)


def summed_by_token(rows: Tensor, at: Tensor, padding: int, by_frequency: bool) -> Tensor:
    """Returns the gradient of an embedding's rows: that of a token in the first of its places, and zeros in the others.

    The sums have the bits of autograd's dense gradient (V, H), and N rows instead of V.

    Args: rows: (N, H), the gradient of each place, which is changed; at: (N,), the token of each place; padding: a
    token without a gradient.
    """
    ordered, order = at.sort(stable=True)
    first = order[torch.searchsorted(ordered, at)]
    rows.masked_fill_((at == padding)[:, None], 0)
    return torch.ops.aten.embedding_dense_backward(rows, first, len(at), -1, by_frequency)


def _put(target: Tensor, start: int, piece: Tensor) -> None:
    target.view(-1)[start : start + piece.numel()].copy_(piece)


def edges(network: nn.Module, head_in_tiles: bool) -> list[Edge]:
    """Returns an `Edge` for each weight that only embedding and head use.

    Args: head_in_tiles: the loss reads the head in tiles; if not, the device needs the full head, and an embedding that
    is tied to it.
    """
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    by_rows = isinstance(embedding, nn.Embedding) and embedding.max_norm is None and not embedding.sparse
    readers = [embedding] if by_rows else []
    readers += [head] if head_in_tiles and type(head) is nn.Linear else []
    edge_list = []
    for weight in dict.fromkeys(reader.weight for reader in readers):
        owners = [module for module in network.modules() if any(weight is p for p in module.parameters(recurse=False))]
        if all(owner in readers for owner in owners):
            edge_list.append(Edge(weight, *(reader if reader in owners else None for reader in (embedding, head))))
    return edge_list
