"""Streams weights: the weights of each streamed block (16-bit, or packed 4-bit) are stored in host memory or on a
drive, and are copied to the device shortly before the block computes. An embedding and a head can be streamed, too
(`edges.py`). `CausalLM`, `MasterWeights` and `HostOptimizer` use the class `StreamedWeights` through the interface in
`on_device.py`.

    compute stream    | block 0      | block 1      | block 2      |      forward; backward runs from last to first
    copy stream       | copy 1       | copy 2       | copy 3       |      prefetch of the next block
    slot 0            | block 0      | -> block 2   | block 2      |      with 2 slots: one block computes in its slot,
    slot 1            | -> block 1   | block 1      | -> block 3   |      the next block is copied into the other slot

Hooks manage the slots, in the thread that runs the forward or backward pass. In this table, "wait" means that the
compute stream waits:

    forward pre-hook of block n          free all slots except that of block n and those with prefetched next blocks,
                                         wait for block n's copy, prefetch the next (slots - 1) blocks
    forward hook of block n              free block n's slot, unless block n computes next, in backward or for
                                         another micro-batch
    hook on the gradient of n's output   free the slots of later blocks, wait for block n's copy, prefetch blocks before
                                         n (first n - 1) while slots are free

In these hooks, the thread itself waits in three cases:

    before it copies a block     until the host has done the block's queued updates; with weights.drive_holds=all also
                                 until the updated weights are on the drive
    with a "staging" thread      before block n computes, until the "staging" thread has launched the copy of block n
                                 (`registered.py`)
    weights.order=by_layer       at the barriers before each block (`by_layer.py`)

Backward computes the gradient of a block's output after all later blocks have finished backward, and before it
recomputes the block. So the hook on this gradient works with every kind of activation checkpointing. If several blocks
are checkpointed together, backward recomputes all of them at once. During recomputation, the forward pre-hook of a
block only binds the block's weights, and the forward hook does nothing.

A `HostBlock` (`host_block.py`) stores the weights of a block; a `Slot` is device memory for a copy of these weights.
`_bind` makes a block's weights views of the slot. Between `move_in` and `stop`, a streamed weight that is not bound is
a placeholder without memory: NaN, or 0 for packed 4-bit weights (`nowhere`).

Streaming saves 2 bytes of device memory per streamed 16-bit parameter of a block, minus the memory of the slots. It
copies up to 4 bytes per such parameter and micro-batch to the device: 2 in forward and 2 in backward. With
weights.order=by_layer the copies are up to 4 bytes per parameter and window instead. The copies take no extra time if
each block computes for longer than the next block's copy takes. Sources: Pudipeddi et al. 2020, arXiv 2002.05645; Ren
et al. 2021, arXiv 2101.06840.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowmem.memory.tracker import belongs
from lowmem.offload.by_layer import ByLayer
from lowmem.offload.copy_lanes import Lane, Mark, lane_of
from lowmem.offload.drive import OnDrive, Sizes
from lowmem.offload.edges import Edge, GradientSink
from lowmem.offload.host_block import HostBlock, nowhere
from lowmem.offload.link import FileBytes
from lowmem.offload.micro_batches import Generators
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.offload.registered import Registered
from lowmem.system.errors import Refused
from lowmem.system.process import share_heap, trim
from lowmem.system.scratch_file import Drive
from lowmem.system.torch_private import in_backward, tree_leaves


class Layout(NamedTuple):
    """The weights that are streamed."""

    blocks: list[nn.Module]  # streamed blocks, in the order of a forward pass
    weights: list[list[Tensor]]  # the streamed weights of each streamed block; its other weights stay on the device
    edges: list[Edge]  # the streamed weights of embedding and head
    in_blocks: set[Tensor]  # all weights of all blocks, including weights and blocks that stay on the device


class Slot:
    """Device memory for the weights of one block."""

    def __init__(self, memory: Tensor, free: Mark) -> None:
        self.memory = memory  # (bytes of the largest streamed block,)
        # the block whose weights are in this slot, or are being copied into this slot; None: the slot is free
        self.host_block: HostBlock | None = None
        self.steps = 0  # `HostBlock.steps` at the time of the copy
        self.landed = free  # reached when the copy into the slot is complete
        # valid while the slot is free; reached when no kernel or copy uses the slot any more
        self.free = free
        self.bound = False  # True: the block's weights are views of `memory`


class StreamedWeights(WeightsOnDevice):
    """Streams the weights of `layout`: weights of blocks, and the weights of embedding and head that the function
    `edges` (`edges.py`) has selected.

    Threads in training: on a card the link's host thread calls `bring_in` and `put`. Hooks run in the thread that
    executes the forward or backward pass; there, hooks on gradients (`MasterWeights`) call `take_gradient`. With
    `by_layer`, the threads of the micro-batches also call `enter`, and in these threads the memory meter reads
    `*_tensors` and `staging_buffers`. The training thread calls all other methods, and before the first step also
    `bring_in` and `put`.

    Args:
        layout: the weights that are streamed.
        slots: number of streamed blocks whose weights can be on the device at the same time. Backward allocates more
            slots if more blocks are recomputed together.
        by_layer: True: all micro-batches of a window compute a block before any computes the next block.
        drive: stores masters and optimizer state of streamed weights; None: host memory stores them.
        drive_weights: True: the drive also stores the weights of the streamed blocks. If `drive` is None, only
            `on_drive` uses this argument.
    """

    streams = True

    def __init__(
        self,
        layout: Layout,
        slots: int,
        by_layer: bool = False,
        drive: Drive | None = None,
        drive_weights: bool = False,
    ) -> None:
        super().__init__()
        self.blocks, self._owned, self.edges, self._in_blocks = layout
        self.slot_count = min(slots, len(self.blocks))
        self.overlaps = by_layer
        # runs the current window; None between windows, without `by_layer`, and in a window of one micro-batch
        self._window: ByLayer | None = None
        self._sink: GradientSink | None = None
        self._on_host = {p for owned in self._owned for p in owned} | {edge.weight for edge in self.edges}
        self._holds_weights = drive_weights
        self._reads = drive is not None and drive_weights  # True: the weights of blocks are read from the drive
        self._on_drive = None if drive is None else self._stored_by(drive)
        self.lane: Lane | None = None
        self._up: Registered | None = None  # copies weights from host memory, or from the drive, to the device
        self._host_block_of: dict[Tensor, HostBlock] = {}
        self._slots: list[Slot] = []
        self._hooks: list = []
        self._lowest = 0  # index of the first streamed block with a backward pass; backward prefetches no earlier block
        self.fetched = 0  # number of block copies to the device

    # --- where weights are ----------------------------------------------------------------------------------------

    def move_in(self, device: torch.device) -> None:
        self.device, self._host_block_of = device, {}  # reset for a second fit
        # Move block by block: each original is freed before the next is copied.
        self.host_blocks = [self._moved(owned) for owned in self._owned]
        for edge in self.edges:
            self._moved([edge.weight])

    def _moved(self, weights: list[Tensor]) -> HostBlock:
        host_block = HostBlock(weights)
        for p in weights:
            self._host_block_of[p] = host_block
            p.data = nowhere(p, p.dtype, self.device)
        if self._reads and weights[0] in self._in_blocks:
            self._on_drive.put_weights(weights[0], host_block.flat)
        trim()  # otherwise later allocations would reuse the freed memory, and the memory meter would not see them
        return host_block

    def waits_on_host(self, p: nn.Parameter) -> bool:
        return p in self._on_host

    def host_block(self, p: nn.Parameter) -> HostBlock | None:
        return self._host_block_of.get(p)

    def staging_buffers(self) -> Iterator[Tensor]:
        yield from () if self._on_drive is None else self._on_drive.memory()
        yield from (edge.staging for edge in self.edges if edge.staging is not None)

    def host_tensors(self) -> Iterator[Tensor]:
        """Yields the host buffers of streamed weights, except blocks that are stored on the drive."""
        yield from () if self._reads else super().host_tensors()
        yield from (self._host_block_of[edge.weight].flat for edge in self.edges if edge.weight in self._host_block_of)

    # --- a drive --------------------------------------------------------------------------------------------------

    def _stored_by(self, drive: Drive | None) -> OnDrive:
        return OnDrive(drive, self._owned, [edge.weight for edge in self.edges], self._holds_weights)

    def bring_in(self, p: nn.Parameter) -> None:
        if self._on_drive is not None:
            self._on_drive.pin(p)

    def put(self, p: nn.Parameter, name: str, tensors: Mapping[str, object]) -> None:
        if self._on_drive is not None:
            self._on_drive.put(p, name, tensors)

    def on_drive(self, host_tensors: Iterable[tuple[nn.Parameter, str, Mapping[str, object]]]) -> Sizes:
        """Returns the sizes that masters and optimizer state, and with `drive_weights` also the blocks' weights, have
        on a drive. The planner calls this method without a drive. Args: host_tensors: for each weight, the arguments of
        `put`."""
        on_drive = self._stored_by(None)
        for p, name, tensors in host_tensors:
            on_drive.put(p, name, tensors)
        for host_block in self.host_blocks if self._holds_weights else ():
            on_drive.put_weights(next(iter(host_block.spans)), host_block.flat)
        return on_drive.sizes

    def finish(self) -> None:
        if self._on_drive is not None:
            self._on_drive.finish()

    @contextmanager
    def being_read(self) -> Iterator[None]:
        if self._on_drive is not None:
            self._on_drive.check()
        try:
            yield
        finally:
            if self._on_drive is not None:
                self._on_drive.drop_cached()

    @property
    def drive(self) -> Drive | None:
        return None if self._on_drive is None else self._on_drive.drive

    def drive_tensors(self) -> Iterable[Tensor]:
        return () if self._on_drive is None else self._on_drive.tensors()

    def device_tensors(self) -> Iterator[Tensor]:
        return (slot.memory for slot in self._slots)

    # not in inference mode, because threads outside of inference mode write into the tensors that are created here
    @torch.inference_mode(False)
    def start(self, sink: GradientSink | None = None) -> None:
        if self._hooks or not self.host_blocks:
            return
        self._sink = sink
        self.lane = self.lane or lane_of(self.device)
        self._up = Registered(self.lane, [*self.host_tensors()], reads=self._reads)
        if sink is not None and self.overlaps:
            # Without a shared heap, each micro-batch's thread would have its own heap, and GPT-2 XL at 8 x 256 tokens
            # would take 1.8 GiB more host memory.
            share_heap()
            # The fp32 sums of a block's gradients are sent in one burst. If the full block is trained, the burst has
            # twice the size of the block's 16-bit weights. Half of the largest burst may wait on the card.
            sink.link.ahead = max(host_block.flat.numel() for host_block in self.host_blocks)
        self._slots = [self._new_slot() for _ in range(self.slot_count)]
        for edge in self.edges:
            edge.start(self._host_block_of[edge.weight], self._up, sink, lambda: self.under_way)
        for number, block in enumerate(self.blocks):
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, number=number: self._enters(number)),
                # always_call: release the block's slot after an error, too
                block.register_forward_hook(
                    lambda _, __, output, number=number: self._leaves(number, output), always_call=True
                ),
            ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for edge in self.edges:
            edge.stop()
        # Ignore errors of queued work: code that waits for the work raises them, and `stop` must restore all weights.
        ignoring_errors = suppress(Exception)
        if self._up is not None:
            with ignoring_errors:
                self._up.close()
        self._hooks, self._slots, self._up, self._sink = [], [], None, None
        if self._on_drive is not None:
            with ignoring_errors:
                self._on_drive.finish()
            self._on_drive.drive.close()
        for p, host_block in self._host_block_of.items():
            with ignoring_errors:
                host_block.wait_for_updates()
            p.data = host_block.tensor(p)

    # --- a window -------------------------------------------------------------------------------------------------

    def run_micro_batches(self, runs: Sequence[Callable[[], None]], generators: Generators) -> None:
        if not self.overlaps or len(runs) == 1:
            super().run_micro_batches(runs, generators)
            return
        self._window = window = ByLayer(runs, generators, self.enter)
        try:
            window.run()
        finally:
            self._window = None
        # if a weight had no gradient in the last micro-batch, its sum has not been sent yet
        for p, gradient in window.sums.items():
            self._sink.link.fetch(gradient, self._sink.sum_of(p).add)

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        # Weights outside the blocks may be as large as several blocks, so their gradients are not summed on the device.
        summed = self._window is not None and p in self._in_blocks
        return self._window.gradient(p) if summed else super().take_gradient(p)

    # --- before and after a block -----------------------------------------------------------------------------------

    def _enters(self, number: int) -> None:
        # In backward, this forward pass is a recomputation. `_reached` has already bound the block's weights, unless
        # the block is part of a checkpointed segment of several blocks.
        if in_backward():
            self._bind(number)
            return
        if self._window is not None:
            self._window.barrier(("forward", number))
        coming = range(number + 1, number + self.slot_count)
        if torch.is_grad_enabled():
            coming = [ahead for ahead in coming if ahead < len(self.blocks)]
        else:  # no backward pass follows, so after the last blocks prefetch the first blocks of the next forward pass
            coming = [ahead % len(self.blocks) for ahead in coming]
        self._release(lambda other, slot: other != number and (slot.bound or other not in coming))
        self._bind(number)
        for ahead in coming:
            self._fetch(ahead)

    def _leaves(self, number: int, output: object) -> None:
        if in_backward():
            return
        hidden = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if hidden is None and output is not None:  # the output is None if the block raised an error
            raise Refused(
                f"weights=streamed: {type(self.blocks[number]).__name__} returned a {type(output).__name__} without a "
                "tensor, so its backward pass cannot be detected. Type weights=resident."
            )
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: self._reached(number))
            self._lowest = min(self._lowest, number)
            if number == len(self.blocks) - 1:  # backward begins here
                return
        else:
            self._lowest = number + 1
        if self._window is None or self.last:
            self._release(lambda other, _: other == number)

    def _reached(self, number: int) -> None:
        """Waits at the block's barrier (only with by_layer), frees the slots of later blocks, binds this block's
        weights, and prefetches earlier blocks as long as slots are free. A hook calls this method in backward when the
        gradient of the block's output exists, so all later blocks have finished backward."""
        if self._window is not None:
            self._window.barrier(("backward", number))
        self._release(lambda other, _: other > number)
        self._bind(number)
        for below in reversed(range(self._lowest, number)):
            if not self._fetch(below):
                return

    # --- slots ----------------------------------------------------------------------------------------------------

    def _new_slot(self) -> Slot:
        size = max(host_block.flat.numel() for host_block in self.host_blocks)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        belongs(memory, "weights")
        return Slot(memory, self._up.mark())

    def _slot_of(self, number: int) -> Slot | None:
        """Returns the slot with a block's current weights, which may still be on their way. Returns None if no slot has
        the block's weights, or if they are older than the block's last update."""
        block = self.host_blocks[number]
        return next((slot for slot in self._slots if slot.host_block is block and slot.steps == block.steps), None)

    def _fetch(self, number: int) -> bool:
        """Starts to copy a block's weights into a free slot, unless a slot already has the current weights. Before a
        copy, blocks until the host has done all queued updates of the block. Returns: False if a copy is needed but no
        slot is free."""
        if self._slot_of(number) is not None:
            return True
        for slot in self._slots:
            if slot.host_block is self.host_blocks[number]:
                assert not (slot.bound and in_backward()), "a block was updated while backward still reads its weights"
                self._free(slot)  # the copy in this slot is older than the last update
        slot = next((slot for slot in self._slots if slot.host_block is None), None)
        if slot is None:
            return False
        block = self.host_blocks[number]
        block.wait_for_updates()
        slot.host_block, slot.steps = block, block.steps
        memory = slot.memory[: block.flat.numel()]
        slot.landed = block.last_copy = self._up.copy(memory, self._source(block), slot.free)
        self.fetched += 1
        return True

    def _source(self, host_block: HostBlock) -> Tensor | FileBytes:
        """Returns a block's weights as a host tensor. With weights.drive_holds=all, waits until the drive has written
        the weights, and returns their location on the drive."""
        if not self._reads:
            return host_block.flat
        return self._on_drive.weights(next(iter(host_block.spans)))

    def _bind(self, number: int) -> None:
        """Makes the device wait for a block's copy, and makes the block's weights views of the slot. If the copy has
        not been started, starts it, in a new slot if no slot is free. A no-op if the weights are bound already."""
        if not self._fetch(number):  # a checkpointed segment of several blocks needs the weights of all its blocks
            self._slots.append(self._new_slot())
            self._fetch(number)
        slot = self._slot_of(number)
        if not slot.bound:
            self._up.hold(slot.landed)
            for p, view in slot.host_block.within(slot.memory).items():
                p.data = view
            slot.bound = True

    def _release(self, which: Callable[[int, Slot], bool]) -> None:
        """Frees the slots that `which` selects. Args: which: called with (index of a block, slot of this block);
        returns True to free the slot."""
        for slot in self._slots:
            if slot.host_block is not None and which(self.host_blocks.index(slot.host_block), slot):
                self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.bound:
            for p in slot.host_block.spans:
                p.data = nowhere(p, p.dtype, self.device)
            slot.free = self._up.mark()
        else:
            slot.free = slot.landed  # the next copy into the slot must wait until the unused copy is complete
        slot.host_block, slot.bound = None, False
