"""Runs jobs one after another in several processes, which communicate over gloo. Every process takes part in every
job."""

import multiprocessing
import os
import signal
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from lowmem.command.launch import free_port
from networks import fp64_loss

LIMIT = 100  # time limit for each answer, in seconds


class Job(NamedTuple):
    """A run. Args: lines: overrides; folder: run folder; at: keys of AT, which name the changes that are made to the
    code before the run."""

    lines: tuple[str, ...]
    folder: Path
    at: tuple[str, ...] = ()


def several(size: int, *jobs: Job) -> list[list[str]]:
    """Runs the jobs on `size` ranks. Returns the answers of each rank: for each job, "" or the traceback of its error.
    A rank that has died, or does not answer in time, has fewer answers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowmem.fit", "lives"])
    ports, calls, processes = [free_port() for _ in jobs], [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_live, args=(theirs, rank, size, jobs, ports), daemon=True))
        processes[-1].start()
        theirs.close()
        calls.append(ours)
    said = [_heard(call, len(jobs)) for call in calls]
    for process in processes:
        process.kill()
        process.join()
    return said


def _heard(call, count: int) -> list[str]:
    said = []
    while len(said) < count and call.poll(LIMIT):
        try:
            said.append(call.recv())
        except EOFError:
            break
    return said


def _live(call, rank: int, size: int, jobs: tuple[Job, ...], ports: list[int]) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for job, port in zip(jobs, ports, strict=True):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in world.items()})
        try:
            live(job, size)
            call.send("")
        except BaseException:
            call.send(traceback.format_exc())


def live(job: Job, size: int = 1) -> None:
    """Runs a job in this process."""
    from lowmem.config.settle import run_of
    from lowmem.fit import fit

    devices = f"devices={size}" if size > 1 else "devices=1"
    with ExitStack() as stack:
        stack.enter_context(patch("lowmem.report.picture.memory_picture", lambda file, *_: file.write_bytes(b"")))
        if "as typed" not in job.at:
            stack.enter_context(patch("lowmem.techniques.loss.cross_entropy.full", _loss))
            stack.enter_context(patch("lowmem.fit.check", lambda *_: None))  # it would refuse fp64
        for name in job.at:
            AT[name](stack)
        fit(run_of((*job.lines, devices)), job.folder)


def _loss(model, micro_batch):
    """Returns the loss in fp64 while training, and in fp32 in evaluations."""
    loss = fp64_loss(model, micro_batch)
    return loss if torch.is_grad_enabled() else loss.float()


# --- changes made before a run ---------------------------------------------------------------------------------------


def _saves_at_once(stack):
    """Makes a run save a checkpoint of its loaded state before the first step."""
    from lowmem.saving.checkpoint import Checkpoints

    start = Checkpoints.on_train_start

    def started(self, trainer, module):
        start(self, trainer, module)
        self.save(trainer)

    stack.enter_context(patch.object(Checkpoints, "on_train_start", started))


def _forgets_state(stack):
    """Deliberately wrong: checkpoints have no optimizer state."""
    from lowmem.saving import by_name

    state = by_name.optimizer_state
    stack.enter_context(patch.object(by_name, "optimizer_state", lambda *what: state(*what) | {"state": {}}))


def _second_rank_at(step: int, does):
    """Returns a change for AT: rank 1 calls `does` before it writes each tensor of the checkpoint of a step."""

    def arrange(stack):
        from lowmem.saving import checkpoint_folder

        written = checkpoint_folder._written

        def writes(tensor, name, stream):
            if os.environ["RANK"] == "1" and f"step-{step:08d}" in str(stream.name):
                does()
            return written(tensor, name, stream)

        stack.enter_context(patch.object(checkpoint_folder, "_written", writes))

    return arrange


def _full_disk():
    raise OSError(28, "No space left on device")


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _cannot_write_shards(stack):
    def fails(*_, **__):
        _full_disk()

    stack.enter_context(patch("transformers.modeling_utils.safe_save_file", fails))


AT = {
    "as typed": lambda _: None,  # trains with the typed precision and loss, not in fp64
    "saves at once": _saves_at_once,
    "forgets state": _forgets_state,
    "disk full at step 3": _second_rank_at(3, _full_disk),
    "killed at step 3": _second_rank_at(3, _die),
    "no room for the export": _cannot_write_shards,
}
