"""Trains in a separate process, which kills itself with SIGKILL at a given moment."""

import io
import os
import signal
from pathlib import Path

import torch


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def live(root: str, overrides: list[str], folder: str, moment: tuple[str, int] | None, renames: bool) -> None:
    """Trains until the moment of the kill.

    Args:
        moment: (place as named in `_arrange`, number of passes of this place before the pass in which the run is
            killed); None: the run is not killed. The number has no effect at "in the last evaluation" and "in the
            export", where the run is killed the first time.
        renames: False is a deliberate mistake: checkpoints are written in place, without a final rename.
    """
    from hydra import compose, initialize_config_dir

    from lowmem.fit import fit
    from lowmem.saving import checkpoint

    if not renames:
        checkpoint.AtomicCheckpointIO.save_checkpoint = _in_place
    if moment is not None:
        _arrange(*moment)
    with initialize_config_dir(str(Path(root) / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    fit(cfg, Path(folder))


def _in_place(self, content: dict, path, storage_options=None) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def _arrange(where: str, passes: int) -> None:
    from lowmem.offload import host_optimizer
    from lowmem.saving import checkpoint
    from lowmem.system import atomic_files
    from lowmem.training.module import CausalLM

    left = [passes]

    def due() -> bool:
        left[0] -= 1
        return left[0] < 0

    save, replace, sync, step = torch.save, os.replace, atomic_files._sync, host_optimizer.HostOptimizer._step
    evaluate = CausalLM.validation_step

    def half_a_file(content, to):
        if not due():
            return save(content, to)
        whole = io.BytesIO()
        save(content, whole)
        with to if hasattr(to, "write") else Path(to).open("wb") as stream:
            stream.write(whole.getvalue()[: whole.tell() // 2])
        die()

    def before_the_rename(source, to):
        if str(to).endswith(".ckpt") and due():
            die()
        replace(source, to)

    def after_the_rename(path):
        if path.name == "checkpoints" and due():
            die()
        sync(path)

    def in_a_step(*arguments):
        if due():
            die()
        step(*arguments)

    def in_the_last_evaluation(self, *arguments):
        if not self.trainer.sanity_checking:
            die()
        return evaluate(self, *arguments)

    def before_the_model_is_in_place(source, to):
        if str(to).endswith("model"):
            die()
        replace(source, to)

    if where == "half a file":
        checkpoint.torch.save = half_a_file
    elif where == "before the rename":
        atomic_files.os.replace = before_the_rename
    elif where == "after the rename":
        atomic_files._sync = after_the_rename
    elif where == "in a step":
        host_optimizer.HostOptimizer._step = in_a_step
    elif where == "in the last evaluation":
        CausalLM.validation_step = in_the_last_evaluation
    else:
        assert where == "in the export"
        atomic_files.os.replace = before_the_model_is_in_place
