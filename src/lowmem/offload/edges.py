"""Keeps the large weights outside the blocks in host memory: the embedding (V, H), and the head (V, H) if the loss
reads the head in tiles. The function `edges` says which of them stay on the device. `StreamedWeights` (`streamed.py`)
starts and stops an `Edge` for each of these weights.

    embedding    host: look up the rows of the micro-batch's tokens -> device: (B x T, H) rows
                 host: add to the gradient (V, H)                   <- device: gradient of these rows
    head         host: a tile of C tokens of the vocabulary         -> device: multiply, while the next tile is copied
                 host: add to the gradient (V, H)                   <- device: gradient of each tile

So the device stores only rows or tiles of the weight and of its gradient. If embedding and head are tied, they share a
single weight in host memory. The head's gradient then waits on the host until the embedding's gradient has been copied,
and the two gradients are added in the weight's dtype, as autograd does.

The embedding's own `forward` still runs, with the looked-up rows as its weight, and with 0, 1, 2, ... instead of the
token ids. So other code of this `forward`, such as a scale factor, still applies. The thread that computes the forward
pass of a micro-batch looks up the rows. On a card the host thread of `link.py` receives gradients. For rows of the
embedding it calls `_take_rows`; for tiles of the head it calls `HostWeight.add`, or `_put` if the weight is tied.
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

COLUMNS = 4096  # tokens of the vocabulary per tile in `_multiply`, which computes all logits


class GradientSink(NamedTuple):
    """Receives the gradients of embedding and head. Autograd cannot store these gradients in `grad`, since the weights
    are not on the device. `StreamedWeights` also sends sums of gradients through the sink (`run_micro_batches`)."""

    link: Link  # copies gradients to the host
    sum_of: Callable[[nn.Parameter], HostWeight]  # returns the object that sums the gradients of a weight
    # called with a weight when all copies of the weight's gradient in one micro-batch have been queued
    complete: Callable[[nn.Parameter], None]


class Edge(HeadSource):
    """A weight (V, H) in host memory that is used by an embedding, a head, or both.

    Args:
        weight: the parameter.
        embedding: the module that looks up rows of the weight; None if only a head uses the weight.
        head: the module that multiplies by the weight; None if only an embedding uses the weight.
    """

    def __init__(self, weight: nn.Parameter, embedding: nn.Embedding | None, head: nn.Linear | None) -> None:
        self.weight, self.embedding, self.head = weight, embedding, head
        # host memory for the rows of a micro-batch while they are copied to the device; None without an embedding, and
        # while this object is not started
        self.staging: Tensor | None = None
        self._patches = ExitStack()
        # The keys of `_of_head` and `_rows` are indices of micro-batches, since several may be in progress.
        # `_of_head`: the head's gradient of a tied weight, which waits in host memory for the embedding's gradient
        self._of_head: dict[int, Tensor] = {}
        # `_rows`: weak reference to looked-up rows whose gradient backward has not computed yet
        self._rows: dict[int, ref[nn.Parameter]] = {}

    def start(
        self, host_block: HostBlock, lane: Lane, sink: GradientSink | None, under_way: Callable[[], int] = lambda: 0
    ) -> None:
        """Replaces the forward passes of embedding and head by functions that read the weight from host memory, and
        makes this object the `source` of the head's tiles.

        Args:
            host_block: stores the weight.
            lane: copies to the device.
            sink: receives gradients; None in an evaluation.
            under_way: returns the index (in its window) of the micro-batch that computes now.
        """
        self.host_block, self.lane, self.sink, self.under_way = host_block, lane, sink, under_way
        if self.embedding is not None:
            # Copied for the host thread, because a lookup temporarily changes the module's `padding_idx`.
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
        self._of_head, self._rows = {}, {}  # entries are left only by a failed pass

    # --- the embedding --------------------------------------------------------------------------------------------

    def _look_up(self, ids: Tensor) -> Tensor:
        """Computes the embedding's forward pass. Args: ids: (B, T) token ids, on the device. Returns: (B, T, H).
        Raises: Refused: the model calls the embedding twice in one forward pass, and the weight is trained."""
        at = ids.flatten().cpu()  # blocks until the compute stream has finished all earlier work
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

    @torch.inference_mode(False)  # threads outside of inference mode may write to the tensors created here
    def _gathered(self, at: Tensor) -> Tensor:
        """Waits for all queued updates of the weight, and copies rows of the weight to the device. Args: at: (N,),
        token ids (indices of rows), in host memory. Returns: (N, H), on the device."""
        self.host_block.wait_for_updates()
        self._sent.synchronize()  # until the previous rows are copied, so that their staging memory can be reused
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
        # `padding_idx` is a token id, but the ids of this lookup are 0, 1, 2, ...
        padding, self.embedding.padding_idx = self.embedding.padding_idx, None
        self.embedding.weight = rows
        try:
            yield
        finally:
            self.embedding.weight, self.embedding.padding_idx = self.weight, padding

    def _leave(self, at: Tensor, rows: nn.Parameter) -> None:
        """Sends the gradient of the looked-up rows to the host. A hook calls this method as soon as backward has
        computed the gradient."""
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
        """Receives a piece of the rows' gradient (N, H). Runs in the host thread, or on a CPU in the thread that runs
        backward. After the last piece, adds the gradient of all rows, and the head's gradient if the weight is tied, to
        the weight's gradient (V, H)."""
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
        """Yields (index of the tile's first token, tile (C, H) on the device); the last tile may be smaller. A tile is
        valid until the next iteration, because a later tile is copied into its memory."""
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
        finally:  # if the caller stops early, the next tile may still be on its way into memory that is freed now
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
        """Reports to the sink that all tiles of the gradient have been sent. For a tied weight this is a no-op, because
        `_leave` reports after it has sent the embedding's gradient. Returns None instead of the gradient, which is sent
        to host memory."""
        if self.embedding is None:
            self.sink.complete(self.weight)

    def _multiply(self, hidden: Tensor) -> Tensor:
        """Computes the head's forward pass, for code that needs all logits, such as sampling. Args: hidden: (..., H).
        Returns: (..., V)."""
        bias = self.head.bias
        products = [
            F.linear(hidden, tile, None if bias is None else bias[first : first + len(tile)])
            for first, tile in self.tiles(COLUMNS)
        ]
        return torch.cat(products, dim=-1)


def summed_by_token(rows: Tensor, at: Tensor, padding: int, by_frequency: bool) -> Tensor:
    """Sums the gradients of all positions that have the same token. On a CPU the sums equal, bit for bit, the rows of
    the dense gradient (V, H) that autograd computes. They take memory for N rows instead of V rows.

    Args:
        rows: (N, H), the gradient of each position; changed in place.
        at: (N,), the token of each position.
        padding: the padding token, whose gradient is zero; -1 if there is no padding token.
        by_frequency: divide each sum by the token's count (`scale_grad_by_freq`).

    Returns:
        (N, H): each token's sum is at the first position of the token; all other positions are zero.
    """
    ordered, order = at.sort(stable=True)
    first = order[torch.searchsorted(ordered, at)]
    rows.masked_fill_((at == padding)[:, None], 0)
    return torch.ops.aten.embedding_dense_backward(rows, first, len(at), -1, by_frequency)


def _put(target: Tensor, start: int, piece: Tensor) -> None:
    target.view(-1)[start : start + piece.numel()].copy_(piece)


def edges(network: nn.Module, head_in_tiles: bool) -> list[Edge]:
    """Returns an `Edge` for the weight of the embedding and an `Edge` for the weight of the head, or a single `Edge` if
    they share one weight. Leaves out a weight that other modules also use, and the weight of a layer that `Edge` does
    not support, such as an embedding with `max_norm`.

    Args:
        network: the model.
        head_in_tiles: True: the loss reads the head in tiles. False: the head stays on the device, and so does an
            embedding that is tied to the head.
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
