"""Streams weights: they wait in host memory, and are on the device only while their block computes.

The device holds one slot for the block that computes and one for the next block, whose weights are copied meanwhile. In
backward a block's weights must be there when the gradient has reached its *output*: that is before anything is
recomputed, whoever recomputes it, and after all blocks above are done. So a hook on the output is enough; it also
starts the copies for the blocks below. While its block does not compute, a parameter is one NaN, expanded to its shape:
a read that comes too early or too late cannot give a plausible number.

It saves the device 2 bytes per parameter of the blocks. It costs 4 bytes per parameter and micro-batch over the link,
all to the device: 2 in forward, 2 again in backward; with `by_layer.py` per window. It costs no time if a block
computes for longer than the copy of the next one takes. Source: Pudipeddi et al. 2020, arXiv 2002.05645; Ren et al.
2021, arXiv 2101.06840.
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
from lowmem.offload.link import Source
from lowmem.offload.micro_batches import Generators
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.offload.registered import Registered
from lowmem.system.errors import Refused
from lowmem.system.process import share_heap, trim
from lowmem.system.scratch_file import Drive
from lowmem.system.torch_private import in_backward, tree_leaves


class Layout(NamedTuple):
    """Says which weights stream."""

    blocks: list[nn.Module]  # whose weights stream, in the order of a forward pass
    weights: list[list[Tensor]]  # of each of these blocks
    edges: list[Edge]  # embedding and head
    in_blocks: set[Tensor]  # weights of all blocks, including resident ones


class Slot:
    """Device memory for the weights of one block."""

    def __init__(self, memory: Tensor, free: Mark) -> None:
        self.memory = memory  # (bytes of the largest block,)
        self.host_block: HostBlock | None = None  # whose weights are here, or are being copied
        self.steps = 0  # its count of updates when they were copied
        self.landed = free  # reached when the weights have arrived
        self.free = free  # reached when nothing reads them any more
        self.bound = False  # True if parameters point into its memory


class StreamedWeights(WeightsOnDevice):
    """Streams the weights of a model's blocks, and of its edges: the embedding, and with loss=tiled the head.

    The thread that computes a micro-batch calls all methods but `bring_in` and `put`, which the host thread calls.

    Args:
        layout: which weights stream.
        slots: blocks whose weights fit on the device at once.
        by_layer: all micro-batches of a window pass through a block before the next block.
        drive: stores masters and optimizer state; None: they are in host memory.
        drive_weights: a drive also stores the blocks' 16-bit weights.
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
        self._window: ByLayer | None = None  # whose micro-batches are under way, if they go by layer
        self._sink: GradientSink | None = None
        self._taken = {p for owned in self._owned for p in owned} | {edge.weight for edge in self.edges}
        self._holds_weights = drive_weights
        self._reads = drive is not None and drive_weights  # the blocks' 16-bit weights are on the drive, too
        self._on_drive = None if drive is None else self._stored_by(drive)
        self.lane: Lane | None = None
        self._up: Registered | None = None  # the lane from host memory to the device
        self._host_block_of: dict[Tensor, HostBlock] = {}
        self._slots: list[Slot] = []
        self._hooks: list = []
        self._lowest = 0  # the lowest block that the gradient will reach; backward fetches none below it
        self.fetched = 0  # the number of copies to the device

    # --- where weights are ----------------------------------------------------------------------------------------

    def move_in(self, device: torch.device) -> None:
        self.device, self._host_block_of = device, {}  # also for a second fit
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
        trim()  # else small weights leave holes in which no host block fits
        return host_block

    def waits_on_host(self, p: nn.Parameter) -> bool:
        return p in self._taken

    def host_block(self, p: nn.Parameter) -> HostBlock | None:
        return self._host_block_of.get(p)

    def staging_buffers(self) -> Iterator[Tensor]:
        yield from () if self._on_drive is None else self._on_drive.memory()
        yield from (edge.staging for edge in self.edges if edge.staging is not None)

    def host_tensors(self) -> Iterator[Tensor]:
        """Yields the memory from which weights are copied to the device."""
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

    def on_drive(self, stored: Iterable[tuple[nn.Parameter, str, Mapping[str, object]]]) -> Sizes:
        """Returns the sizes on a drive of what the host stores, whether or not there is one. Args: stored: arguments of
        `put`."""
        on_drive = self._stored_by(None)
        for p, name, tensors in stored:
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

    # not in inference mode, even in an evaluation: other threads, which are outside of it, write into these tensors
    @torch.inference_mode(False)
    def start(self, sink: GradientSink | None = None) -> None:
        if self._hooks or not self.host_blocks:
            return
        self._sink = sink
        self.lane = self.lane or lane_of(self.device)
        self._up = Registered(self.lane, [*self.host_tensors()], reads=self._reads)
        if sink is not None and self.overlaps:
            share_heap()  # each micro-batch has a thread: 1.8 GiB of 8 x 256 tokens through blocks of GPT-2 XL
            # Let one block's 16-bit size of gradients queue on the card: its fp32 sums, twice that, leave in one burst.
            sink.link.ahead = max(host_block.flat.numel() for host_block in self.host_blocks)
        self._slots = [self._new_slot() for _ in range(self.slot_count)]
        for edge in self.edges:
            edge.start(self._host_block_of[edge.weight], self._up, sink, lambda: self.under_way)
        for number, block in enumerate(self.blocks):
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, number=number: self._enters(number)),
                # also after an error: a later run finds nothing left over
                block.register_forward_hook(
                    lambda _, __, output, number=number: self._leaves(number, output), always_call=True
                ),
            ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for edge in self.edges:
            edge.stop()
        # an error was already raised to the code that waited; the run still has to end
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
        for p, gradient in window.sums.items():  # those to which the last micro-batch had nothing to add
            self._sink.link.fetch(gradient, self._sink.sum_of(p).add)

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        # Weights outside the blocks may be as large as several blocks: theirs leave one by one.
        summed = self._window is not None and p in self._in_blocks
        return self._window.gradient(p) if summed else super().take_gradient(p)

    # --- before and after a block -----------------------------------------------------------------------------------

    def _enters(self, number: int) -> None:
        # The block is recomputed. `_reached` has bound its weights, unless it is inside a segment of several blocks.
        if in_backward():
            self._bind(number)
            return
        if self._window is not None:
            self._window.barrier(("forward", number))
        coming = range(number + 1, number + self.slot_count)
        if torch.is_grad_enabled():
            coming = [ahead for ahead in coming if ahead < len(self.blocks)]
        else:  # no backward pass follows, but perhaps the next forward pass
            coming = [ahead % len(self.blocks) for ahead in coming]
        self._release(lambda other, slot: other != number and (slot.bound or other not in coming))
        self._bind(number)
        for ahead in coming:
            self._fetch(ahead)

    def _leaves(self, number: int, output: object) -> None:
        if in_backward():
            return
        hidden = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if hidden is None and output is not None:  # None: it raised
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
        """Frees the blocks above, binds this block's weights and copies those below ahead. Is called when the gradient
        has reached the block's output, so all blocks above are done."""
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
        """Returns the slot that has a block's weights in their present version."""
        block = self.host_blocks[number]
        return next((slot for slot in self._slots if slot.host_block is block and slot.steps == block.steps), None)

    def _fetch(self, number: int) -> bool:
        """Starts to copy a block's weights. Returns: False if no slot is free."""
        if self._slot_of(number) is not None:
            return True
        for slot in self._slots:
            if slot.host_block is self.host_blocks[number]:
                assert not (slot.bound and in_backward()), "a block was updated while backward still reads its weights"
                self._free(slot)  # they are from before a step
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

    def _source(self, host_block: HostBlock) -> Tensor | Source:
        """Returns the weights of a block, in memory or on the drive."""
        if not self._reads:
            return host_block.flat
        return self._on_drive.weights(next(iter(host_block.spans)))

    def _bind(self, number: int) -> None:
        """Points a block's parameters into its slot, after making the device wait for the copy."""
        if not self._fetch(number):  # a segment of several blocks is recomputed: all of its weights are needed
            self._slots.append(self._new_slot())
            self._fetch(number)
        slot = self._slot_of(number)
        if not slot.bound:
            self._up.hold(slot.landed)
            for p, view in slot.host_block.within(slot.memory).items():
                p.data = view
            slot.bound = True

    def _release(self, which: Callable[[int, Slot], bool]) -> None:
        """Frees slots. Args: which: (number of a block, a slot that has its weights) -> True if it is free from
        now on."""
        for slot in self._slots:
            if slot.host_block is not None and which(self.host_blocks.index(slot.host_block), slot):
                self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.bound:
            for p in slot.host_block.spans:
                p.data = nowhere(p, p.dtype, self.device)
            slot.free = self._up.mark()
        else:
            slot.free = slot.landed  # so that the next copy does not overtake one that is still coming
        slot.host_block, slot.bound = None, False
