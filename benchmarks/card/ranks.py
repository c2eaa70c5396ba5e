"""Callbacks that stage 8 adds to each rank of a run, as in `+callbacks.seen._target_=benchmarks.card.ranks.Seen`."""

import json
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.card.several import LIMIT, SEEN


class Seen(Callback):
    """Writes a file with whether a rank's shards are in pinned memory, and the bytes of its card that are not torch's.

    Those are CUDA's context, kernels and NCCL's buffers. Args: folder: the folder of the files, one of each rank.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        seen = {"pinned": all(p.is_pinned() for p in module.local_parameters.parameters()), "beside": 0}
        if module.ranks.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            seen["beside"] = total - free - torch.cuda.memory_reserved()
        (self.folder / SEEN.format(module.ranks.rank)).write_text(json.dumps(seen))


class Hangs(Callback):
    """Makes the last rank sleep in its second micro-batch, for longer than the others wait."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx == 1 and module.ranks.rank == module.ranks.size - 1:
            time.sleep(100 * LIMIT)
