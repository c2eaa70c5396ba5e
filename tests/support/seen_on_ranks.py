"""Defines a callback for all ranks of a run, which the override `+callbacks.seen._target_=seen_on_ranks.Pinned`
adds."""

from pathlib import Path

from lightning.pytorch import Callback


class Pinned(Callback):
    """At the end of training, each rank writes "True" if all its shards are in pinned memory, otherwise "False". Args:
    folder: folder for one file per rank."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer, module) -> None:
        pinned = all(p.is_pinned() for p in module.local_parameters.parameters())
        (self.folder / f"rank-{module.ranks.rank}").write_text(str(pinned))
