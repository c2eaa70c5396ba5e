"""Streams weights: they wait in host memory, and are on the device only while their block computes.

The device holds one slot for the block that computes and one for the next block, whose weights are copied meanwhile. In
backward a block's weights must be there when the gradient has reached its *output*: that is before anything is
recomputed, whoever recomputes it, and after all blocks above are done. So a hook on the output is enough; it also
starts the copies for the blocks below. Outside its turn a parameter is one NaN, expanded to its shape: a read that
comes too early or too late cannot give a plausible number.

It saves the device 2 bytes per parameter of the blocks. It costs 4 bytes per parameter and micro-batch over the link,
all to the device: 2 in forward, 2 again in backward; with `by_layer.py` per window. It costs no time if a block
computes for longer than the copy of the next one takes. Source: Pudipeddi et al. 2020, arXiv 2002.05645; Ren et al.
2021, arXiv 2101.06840.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from lowmem.memory.tracker import belongs
from lowmem.model.blocks import blocks
from lowmem.model.trainable import stored_weights
from lowmem.system.copy_lanes import Lane, Mark, lane_of
from lowmem.system.errors import Refused
from lowmem.system.process import share_heap, trim
from lowmem.system.scratch_file import Drive
from lowmem.system.torch_private import in_backward, tree_leaves
from lowmem.system.units import quantity
from lowmem.techniques.weights.by_layer import ByLayer
from lowmem.techniques.weights.drive import OnDrive, Sizes
from lowmem.techniques.weights.edges import GradientSink, edges
from lowmem.techniques.weights.link import Source
from lowmem.techniques.weights.registered import Registered
from lowmem.techniques.weights.resident import Home, Pass, Resident, nowhere

HOLDS = ("state", "all")  # of weights.drive_holds


class Slot:
    """Device memory for the weights of one block."""

    def __init__(self, memory: Tensor, free: Mark) -> None:
        self.memory = memory  # (bytes of the largest block,)
        self.home: Home | None = None  # the home whose weights are here, or on their way
        self.steps = 0  # that home's count of updates when they were copied
        self.landed = free  # reached when the weights have arrived
        self.free = free  # reached when nothing reads them any more
        self.bound = False  # True if parameters point into its memory


class Streamed(Resident):
    """Streams the weights of a model's blocks, and of its edges: the embedding, and with loss=tiled the head.

    Args: network: the model; resident_blocks: this many blocks, spread evenly, stay on the device; slots, order, drive,
    drive_holds: see conf/weights; steps_in: is not used here, precision=bf16-sr reads it; head_in_tiles: the loss reads
    the head in tiles.

    Raises:
        Refused: fewer than two blocks with weights of their own are left to stream; resident_blocks is negative; there
            are fewer than two slots.
    """

    streams = True

    def __init__(  # noqa: PLR0913
        self,
        network: nn.Module,
        resident_blocks: int = 0,
        slots: int = 2,
        steps_in: str = "bf16_on_host",
        head_in_tiles: bool = False,
        order: str = "by_micro_batch",
        drive: str | None = None,
        drive_holds: str = "state",
    ) -> None:
        super().__init__(network, steps_in)
        stack = blocks(network)
        if resident_blocks and not 0 < resident_blocks <= len(stack) - 2:
            raise Refused(
                f"weights.resident_blocks={resident_blocks}: this model has {quantity(len(stack), 'block')}, and at "
                "least 2 must be streamed. Type "
                f"weights.resident_blocks={len(stack) // 2 if len(stack) > 2 else 0}, or weights=resident to keep "
                "all blocks on the device."
            )
        if slots < 2:
            raise Refused(
                f"weights.slots={slots}: streaming needs at least 2 slots (one block computes while the next is "
                "copied). Type weights.slots=2."
            )
        owned = _of_one_block_alone(network, stack)
        self.blocks = [block for block in spread(stack, len(stack) - resident_blocks) if owned[block]]
        if len(self.blocks) < 2:
            raise Refused(
                "weights=streamed: streaming needs at least 2 blocks whose weights no other module shares, and "
                f"{type(network).__name__} has {len(self.blocks)} to stream. Type weights=resident."
            )
        self.slot_count = min(slots, len(self.blocks))
        self._owned = [owned[block] for block in self.blocks]
        self.edges = edges(network, head_in_tiles)
        self.overlaps = order == "by_layer"
        self._window: ByLayer | None = None  # whose micro-batches are under way, if they go by layer
        self._in_blocks = {p for block in stack for p in stored_weights(block)}
        self._sink: GradientSink | None = None
        self._taken = {p for owned in self._owned for p in owned} | {edge.weight for edge in self.edges}
        if drive_holds not in HOLDS:
            raise Refused(f"weights.drive_holds={drive_holds}: unknown value. Type {' or '.join(HOLDS)}.")
        if drive is not None and drive_holds == "state" and not any(p.requires_grad for p in self._taken):
            raise Refused(
                f"weights.drive={drive}: all streamed weights are frozen, so there are no masters and no optimizer "
                "state to store there. Type weights.drive_holds=all to store the weights there, or weights.drive=null."
            )
        self._holds_weights = drive_holds == "all"
        self._reads = drive is not None and self._holds_weights  # the blocks' 16-bit weights are on the drive, too
        self._on_drive = None if drive is None else self._stored_by(Drive(Path(drive).expanduser()))
        self.lane: Lane | None = None
        self._up: Registered | None = None  # the lane from the homes to the device
        self._home_of: dict[Tensor, Home] = {}
        self._slots: list[Slot] = []
        self._hooks: list = []
        self._lowest = 0  # the lowest block that the gradient will reach; backward fetches none below it
        self.fetched = 0  # the number of copies to the device

    # --- where weights are ----------------------------------------------------------------------------------------

    def move_in(self, device: torch.device) -> None:
        self.device, self._home_of = device, {}  # also for a second fit
        # one after the other, so that each original is freed before the next copy
        self.homes = [self._moved(owned) for owned in self._owned]
        for edge in self.edges:
            self._moved([edge.weight])

    def _moved(self, weights: list[Tensor]) -> Home:
        home = Home(weights)
        for p in weights:
            self._home_of[p] = home
            p.data = nowhere(p, p.dtype, self.device)
        if self._reads and weights[0] in self._in_blocks:
            self._on_drive.put_weights(weights[0], home.flat)
        trim()  # else small weights leave holes in which no home fits
        return home

    def waits_on_host(self, p: nn.Parameter) -> bool:
        return p in self._taken

    def home(self, p: nn.Parameter) -> Home | None:
        return self._home_of.get(p)

    def host_tensors(self) -> Iterator[Tensor]:
        yield from self._waiting()
        yield from () if self._on_drive is None else self._on_drive.memory()

    def _waiting(self) -> Iterator[Tensor]:
        """Yields the memory from which weights are copied to the device."""
        yield from () if self._reads else super().host_tensors()
        yield from (self._home_of[edge.weight].flat for edge in self.edges if edge.weight in self._home_of)

    # --- a drive --------------------------------------------------------------------------------------------------

    def _stored_by(self, drive: Drive | None) -> OnDrive:
        return OnDrive(drive, self._owned, [edge.weight for edge in self.edges], self._holds_weights)

    def bring_in(self, p: nn.Parameter) -> None:
        if self._on_drive is not None:
            self._on_drive.turn(p)

    def put(self, p: nn.Parameter, name: str, tensors: Mapping[str, object]) -> None:
        if self._on_drive is not None:
            self._on_drive.put(p, name, tensors)

    def on_drive(self, stored: Iterable[tuple[nn.Parameter, str, Mapping[str, object]]]) -> Sizes:
        """Returns the sizes on a drive of what the host stores, whether or not there is one. Args: stored: arguments of
        `put`."""
        on_drive = self._stored_by(None)
        for p, name, tensors in stored:
            on_drive.put(p, name, tensors)
        for home in self.homes if self._holds_weights else ():
            on_drive.put_weights(next(iter(home.places)), home.flat)
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
        if self._hooks or not self.homes:
            return
        self._sink = sink
        self.lane = self.lane or lane_of(self.device)
        self._up = Registered(self.lane, [*self._waiting()], reads=self._reads)
        if sink is not None and self.overlaps:
            share_heap()  # each micro-batch has a thread: 1.8 GiB of 8 x 256 tokens through blocks of GPT-2 XL
            # half of the fp32 sums of a block, which all leave in one turn
            sink.link.ahead = max(home.flat.numel() for home in self.homes)
        self._slots = [self._new_slot() for _ in range(self.slot_count)]
        for edge in self.edges:
            edge.start(self._home_of[edge.weight], self._up, sink, self._under_way)
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
        for p, home in self._home_of.items():
            with ignoring_errors:
                home.wait_for_updates()
            p.data = home.tensor(p)

    # --- a window -------------------------------------------------------------------------------------------------

    def run_micro_batches(self, passes: Sequence[Pass]) -> None:
        if not self.overlaps or len(passes) == 1:
            super().run_micro_batches(passes)
            return
        self._window = window = ByLayer(passes, self.device)
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

    def _under_way(self) -> int:
        """Returns the number of the micro-batch that computes."""
        return 0 if self._window is None else self._window.current

    # --- whose turn it is -----------------------------------------------------------------------------------------

    def _enters(self, number: int) -> None:
        # The block is recomputed. `_reached` has bound its weights, unless it is inside a segment of several blocks.
        if in_backward():
            self._bind(number)
            return
        if self._window is not None:
            self._window.door(("forward", number))
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
        if self._window is None or self._window.last:
            self._release(lambda other, _: other == number)

    def _reached(self, number: int) -> None:
        """Frees the blocks above, binds this block's weights and copies those below ahead. Is called when the gradient
        has reached the block's output, so all blocks above are done."""
        if self._window is not None:
            self._window.door(("backward", number))
        self._release(lambda other, _: other > number)
        self._bind(number)
        for below in reversed(range(self._lowest, number)):
            if not self._fetch(below):
                return

    # --- slots ----------------------------------------------------------------------------------------------------

    def _new_slot(self) -> Slot:
        size = max(home.flat.numel() for home in self.homes)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        belongs(memory, "weights")
        return Slot(memory, self._up.mark())

    def _slot_of(self, number: int) -> Slot | None:
        """Returns the slot that has a block's weights in their present version."""
        home = self.homes[number]
        return next((slot for slot in self._slots if slot.home is home and slot.steps == home.steps), None)

    def _fetch(self, number: int) -> bool:
        """Starts to copy a block's weights. Returns: False if no slot is free."""
        if self._slot_of(number) is not None:
            return True
        for slot in self._slots:
            if slot.home is self.homes[number]:
                assert not (slot.bound and in_backward()), "a block was updated while backward still reads its weights"
                self._free(slot)  # they are from before a step
        slot = next((slot for slot in self._slots if slot.home is None), None)
        if slot is None:
            return False
        home = self.homes[number]
        home.wait_for_updates()
        slot.home, slot.steps = home, home.steps
        slot.landed = home.last_copy = self._up.copy(slot.memory[: home.flat.numel()], self._source(home), slot.free)
        self.fetched += 1
        return True

    def _source(self, home: Home) -> Tensor | Source:
        """Returns the weights of a block, in memory or on the drive."""
        if not self._reads:
            return home.flat
        return self._on_drive.weights(next(iter(home.places)))

    def _bind(self, number: int) -> None:
        """Points a block's parameters into its slot, after making the device wait for the copy."""
        if not self._fetch(number):  # a segment of several blocks is recomputed: all of its weights are needed
            self._slots.append(self._new_slot())
            self._fetch(number)
        slot = self._slot_of(number)
        if not slot.bound:
            self._up.hold(slot.landed)
            for p, view in slot.home.within(slot.memory).items():
                p.data = view
            slot.bound = True

    def _release(self, which: Callable[[int, Slot], bool]) -> None:
        """Frees slots. Args: which: (number of a block, a slot that has its weights) -> True if it is free from
        now on."""
        for slot in self._slots:
            if slot.home is not None and which(self.homes.index(slot.home), slot):
                self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.bound:
            for p in slot.home.places:
                p.data = nowhere(p, p.dtype, self.device)
            slot.free = self._up.mark()
        else:
            slot.free = slot.landed  # so that the next copy does not overtake one that is still coming
        slot.home, slot.bound = None, False


def spread(stack: list[nn.Module], count: int) -> list[nn.Module]:
    """Returns `count` items of a list, spread evenly and ending with the last: about equally many resident blocks
    compute before each block that streams."""
    return [stack[(number + 1) * len(stack) // count - 1] for number in range(count)]


def _of_one_block_alone(network: nn.Module, stack: list[nn.Module]) -> dict[nn.Module, list[Tensor]]:
    """Returns block -> its weights that no other block and no module outside has: shared ones stay on the device, and
    so do the few that are trained in a block that is mostly frozen, as an adapter's: its home is only read."""
    blocks_with = Counter(p for block in stack for p in stored_weights(block))
    inside = {module for block in stack for module in block.modules()}
    outside = {p for module in network.modules() if module not in inside for p in module.parameters(recurse=False)}
    owned = {block: [p for p in stored_weights(block) if blocks_with[p] == 1 and p not in outside] for block in stack}
    return {block: _frozen_if_most_are(weights) for block, weights in owned.items()}


def _frozen_if_most_are(weights: list[Tensor]) -> list[Tensor]:
    frozen = [p for p in weights if not p.requires_grad]
    return frozen if 2 * sum(p.nbytes for p in frozen) > sum(p.nbytes for p in weights) else weights
