"""`weights=streamed`: checks the settings, and selects the weights that are streamed.

A streamed weight of a block is stored in host memory, or with drive_holds=all on the drive. It is copied to the device
shortly before its block computes. `offload/streamed.py` does the copies. Two kinds of weights in a streamed block stay
on the device: weights that the block shares with modules outside of it, and the trained weights of a mostly frozen
block, such as the matrices of an adapter.
"""

from collections import Counter
from pathlib import Path

from torch import Tensor, nn

from lowmem.model.blocks import blocks
from lowmem.model.trainable import stored_weights
from lowmem.offload.edges import edges
from lowmem.offload.streamed import Layout, StreamedWeights
from lowmem.system.errors import Refused
from lowmem.system.scratch_file import Drive
from lowmem.system.units import quantity

HOLDS = ("state", "all")  # values of weights.drive_holds


class Streamed(StreamedWeights):
    """Streams the weights of a model's blocks (exceptions: see the module's docstring), its embedding, and its head if
    the loss reads the head in tiles. All other weights stay on the device, and so do `resident_blocks` blocks, an
    embedding that is tied to a head on the device, and an embedding or head that `offload/edges.py` does not support.

    Args:
        network: the model.
        head_in_tiles: True: the loss reads the head in tiles (loss=tiled and the preference losses).
        order: by_micro_batch or by_layer.
        resident_blocks, slots, drive, drive_holds: see conf/weights/streamed.yaml.

    Raises:
        Refused: fewer than two blocks can be streamed; `resident_blocks` leaves fewer than two blocks to stream, or is
            negative; `slots` is less than 2; `drive_holds` is not in `HOLDS`; with `drive` and drive_holds=state, all
            streamed weights are frozen, so there is nothing to store on the drive; or the model has no list of blocks.
        OSError: the drive's folder cannot be created or written.
    """

    def __init__(  # noqa: PLR0913
        self,
        network: nn.Module,
        resident_blocks: int = 0,
        slots: int = 2,
        head_in_tiles: bool = False,
        order: str = "by_micro_batch",
        drive: str | None = None,
        drive_holds: str = "state",
    ) -> None:
        if slots < 2:
            raise Refused(
                f"weights.slots={slots}: streaming needs at least 2 slots (one block computes while the next is "
                "copied). Type weights.slots=2."
            )
        if drive_holds not in HOLDS:
            raise Refused(f"weights.drive_holds={drive_holds}: unknown value. Type {' or '.join(HOLDS)}.")
        layout = _layout(network, resident_blocks, head_in_tiles)
        streams = [p for weights in layout.weights for p in weights] + [edge.weight for edge in layout.edges]
        if drive is not None and drive_holds == "state" and not any(p.requires_grad for p in streams):
            raise Refused(
                f"weights.drive={drive}: all streamed weights are frozen, so there are no masters and no optimizer "
                "state to store there. Type weights.drive_holds=all to store the weights there, or weights.drive=null."
            )
        place = None if drive is None else Drive(Path(drive).expanduser())
        super().__init__(layout, slots, order == "by_layer", place, drive_holds == "all")


def _layout(network: nn.Module, resident_blocks: int, head_in_tiles: bool) -> Layout:
    stack = blocks(network)
    if resident_blocks and not 0 < resident_blocks <= len(stack) - 2:
        raise Refused(
            f"weights.resident_blocks={resident_blocks}: this model has {quantity(len(stack), 'block')}, and at "
            "least 2 must be streamed. Type "
            f"weights.resident_blocks={len(stack) // 2 if len(stack) > 2 else 0}, or weights=resident to keep "
            "all blocks on the device."
        )
    owned = _of_one_block_alone(network, stack)
    streaming = [block for block in spread(stack, len(stack) - resident_blocks) if owned[block]]
    if len(streaming) < 2:
        raise Refused(
            "weights=streamed: streaming needs at least 2 blocks whose weights no other module shares, and "
            f"{type(network).__name__} has {len(streaming)} to stream. Type weights=resident."
        )
    in_blocks = {p for block in stack for p in stored_weights(block)}
    return Layout(streaming, [owned[block] for block in streaming], edges(network, head_in_tiles), in_blocks)


def spread(stack: list[nn.Module], count: int) -> list[nn.Module]:
    """Returns `count` items of a list, spaced as evenly as possible and including the last item. The remaining items,
    the resident blocks, are therefore spread evenly too. While resident blocks compute, streamed blocks are copied."""
    return [stack[(number + 1) * len(stack) // count - 1] for number in range(count)]


def _of_one_block_alone(network: nn.Module, stack: list[nn.Module]) -> dict[nn.Module, list[Tensor]]:
    """Returns, for each block, the weights to stream: the weights that only this block uses. If more than half of the
    bytes of these weights are frozen, only the frozen weights are streamed, so the block's copy in host memory never
    changes."""
    blocks_with = Counter(p for block in stack for p in stored_weights(block))
    inside = {module for block in stack for module in block.modules()}
    outside = {p for module in network.modules() if module not in inside for p in module.parameters(recurse=False)}
    owned = {block: [p for p in stored_weights(block) if blocks_with[p] == 1 and p not in outside] for block in stack}
    return {block: _frozen_if_most_are(weights) for block, weights in owned.items()}


def _frozen_if_most_are(weights: list[Tensor]) -> list[Tensor]:
    frozen = [p for p in weights if not p.requires_grad]
    return frozen if 2 * sum(p.nbytes for p in frozen) > sum(p.nbytes for p in weights) else weights
