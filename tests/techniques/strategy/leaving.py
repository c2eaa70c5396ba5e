"""Leaves process groups again and again, in one process and in pairs of ranks, and prints how many rounds have ended.

    python tests/techniques/strategy/leaving.py --rounds 2000   # groups in which DDP has trained, in one process
    python tests/techniques/strategy/leaving.py --rounds 2000 --wrong  # destroys the group before DDP, and hangs
    python tests/techniques/strategy/leaving.py --runs 200  # runs of `strategy=ddp` on two newly forked ranks

If a round or a run hangs for a minute, the command prints the stack of every thread and ends.
"""

import argparse
import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lowmem.command.launch import free_port
from lowmem.techniques.strategy.ddp import DataParallel
from lowmem.techniques.strategy.process_group import leave

LIMIT = 60.0  # seconds that a round, or a run of two ranks on a busy machine, may take
LINES = (
    *("strategy=ddp", "devices=2", "device=cpu", "data=random", "seq_len=16", "batch_size=4", "max_steps=2"),
    *("model.architecture.n_embd=32", "model.architecture.n_layer=2", "model.architecture.n_head=2"),
    *("val_sequences=8", "sample_tokens=0", "logger=none", "plan=off", "export=null"),
)


class Trained(nn.Module):
    """Stands in for a run's module: a model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.position = nn.Linear(8, 8), argparse.Namespace(window=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()


def one_round(wrong: bool) -> None:
    """Trains three windows in a group of one rank, and leaves the group at once, while its threads may still work."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = DataParallel()
    ranks.before_training(Trained())
    for _ in range(3):
        ranks.forward(torch.ones(2, 8)).backward()
    ranks._watch_no_more()  # as after a run's first window: the hooks would keep DDP and its group alive
    if wrong:
        dist.destroy_process_group()  # DDP is freed only when this function returns
    else:
        leave(ranks)


def rounds(count: int, wrong: bool = False) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # otherwise each collection also searches all imported objects, which takes longer than a round
    for number in range(count):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        one_round(wrong)
        if number % 500 == 0 or number == count - 1:
            print(f"{number + 1} rounds, {threads()} threads", flush=True)
    faulthandler.cancel_dump_traceback_later()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def gloo_threads() -> set[str]:
    """Returns the ids of this process's gloo threads."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended meanwhile
            if "gloo" in (task / "comm").read_text():
                found.add(task.name)
    return found


def two_ranks(processes, folder: Path) -> list[int | None]:
    """Returns the exit codes of both ranks; None for a rank that has not ended."""
    port = free_port()
    ranks = [processes.Process(target=run, args=(rank, port, str(folder)), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + LIMIT
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def run(rank: int, port: int, folder: str) -> None:
    """Trains as one of two ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    faulthandler.dump_traceback_later(LIMIT - 5, exit=True)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    from lowmem.config.typed_lines import composed
    from lowmem.fit import fit

    fit(composed([*LINES, f"cache_dir={folder}/cache"]), Path(folder) / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--runs", type=int, default=0)
    asked = parser.parse_args()
    rounds(asked.rounds, asked.wrong)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["lowmem.fit"])
    begun = time.monotonic()
    for number in range(asked.runs):
        with tempfile.TemporaryDirectory() as folder:
            if (codes := two_ranks(processes, Path(folder))) != [0, 0]:
                sys.exit(f"Run {number + 1}: the ranks ended with {codes}; None is a rank that stood still.")
    if asked.runs:
        print(f"{asked.runs} runs of two ranks in {time.monotonic() - begun:.0f} s, all ended with exit code 0")


if __name__ == "__main__":
    main()
