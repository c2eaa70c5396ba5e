"""Compares lowmem with RoundPipe 0.1.1 and TrainStream 0.4.1: full fine-tuning of 1.7B parameters under 24 GiB.

All three train equal networks (the shapes of Qwen3-1.7B, equal random weights in bf16) on equal random rows, 8 x 2048
tokens per step. All three have AdamW on the host, fp32 masters, no clipping, and recomputation of activations.
Differences:

- lowmem streams the weights layer by layer and stores its optimizer state in 8 bits, as in its recipe. Another row of
  lowmem has fp32 state, like RoundPipe and TrainStream.
- RoundPipe streams the weights in stages of several layers and divides the rows into 2 micro-batches (its default). By
  default its optimizer update runs during the next step, so the next step computes with weights that lack this update.
  Its synchronous mode waits for the update, like lowmem.
- TrainStream keeps the weights on the card if they fit. During backward it copies gradients to the host, and the host
  updates each weight when its gradient has arrived. It gets all 8 rows in one micro-batch, so that each gradient is
  copied only once per step.

Every row runs in a separate process, because RoundPipe ends its process on an error, and torch caches pinned memory
that has been freed. TrainStream's extension, and RoundPipe's optimizer and loss, are compiled before the timed block.

python -m benchmarks.card.peers <row> <device>
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from benchmarks import runner
from benchmarks.card import ours
from benchmarks.card.blocks import Blocks, attempt, flops_per_token
from benchmarks.card.case import Here
from benchmarks.card.peer_loops import Step, roundpipe, trainstream, traits
from lowmem.model import loading
from lowmem.system.process import available_bytes, peak_rss_bytes
from lowmem.training import build

RUN = "1.7B, streamed by layer, 8 x 2048"
GIB = 24  # the cap of the card's memory
STEPS = {"cuda": 8, "cpu": 2}
WARM_UP = {"cuda": 6, "cpu": 1}  # the peers adapt their plans in the first steps
PATIENCE = 150  # time limit of each process in seconds, so that a peer that hangs leaves time for the other rows
OURS = {"lowmem": ("8 bits", ()), "lowmem, fp32 state": ("32 bits", ("optim=adamw",))}
PEERS = {
    "RoundPipe, synchronous": partial(roundpipe, is_async=False),
    "RoundPipe": partial(roundpipe, is_async=True),
    "TrainStream": trainstream,
}


def streamed(here: Here) -> Iterator[dict]:
    """Yields the rows of lowmem and of each peer."""
    for name in ("lowmem", *PEERS, "lowmem, fp32 state"):
        if name in PEERS and not here.on_card:
            row = {"why": "it needs CUDA", "blocks": []}
        else:
            row = attempt(partial(_in_process, name, here))
        yield {"run": RUN, **row, "by": name}


def _in_process(name: str, here: Here) -> dict:
    """Returns the row that a separate process prints.

    Raises:
        SystemExit: the process failed; the message ends with its last output.
        TimeoutExpired: the process took longer than PATIENCE and was killed.
    """
    arguments = ["-m", "benchmarks.card.peers", name, here.device]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=runner.ROOT,
        env=runner.environment(here.folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return runner.result(arguments, done.returncode, done.stdout, done.stderr)


# --- the process of one row ---------------------------------------------------------------------------------------


class Measured(Blocks):
    """Times a block, and samples the machine's available memory after each step, because the resident memory of a
    process may not include pinned memory."""

    def __init__(self, here: Here) -> None:
        super().__init__(here, STEPS[here.device], WARM_UP[here.device])
        self.free = self.least = available_bytes()

    def end(self) -> None:
        super().end()
        self.least = min(self.least, available_bytes())

    @property
    def taken(self) -> dict[str, float]:
        return {"host memory that the run took (GiB)": round((self.free - self.least) / 2**30, 2)}


def main() -> None:
    name, device = sys.argv[1:]
    here = Here(device, Path(os.environ["ROW_FOLDER"]))
    print(json.dumps(_ours(here, *OURS[name]) if name in OURS else _theirs(here, name)), flush=True)


def _ours(here: Here, state: str, lines: tuple[str, ...]) -> dict:
    watch = Measured(here)
    cap = [f"memory.limit={GIB}GiB"] if here.on_card else []
    row = ours.train(RUN, here, watch, *cap, *lines)
    return row | {"found": traits(state, stale=False, streams=True) | watch.taken}


def _theirs(here: Here, peer: str) -> dict:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, which the peers need
    torch.cuda.set_per_process_memory_fraction(min(1.0, GIB / here.gib()))
    watch = Measured(here)
    network, steps = built(here, watch.all_steps)
    tokens, seq_len = steps[0].ids.numel(), steps[0].ids.shape[1]
    flops = flops_per_token(network, seq_len)
    found = PEERS[peer](network, steps, watch)
    return {
        "tokens": tokens,
        "flops_per_token": flops,
        "blocks": [watch.as_dict()],
        "losses": watch.losses(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": peak_rss_bytes(),
        "found": found | watch.taken,
    }


def built(here: Here, steps: int) -> tuple[nn.Module, list[Step]]:
    """Returns the network of lowmem's run, in bf16 on the host, and for each step its rows in one batch."""
    data = build.data(ours.composed(RUN, here))
    with ours.drawn_at_once(here.device):
        network = loading.load(data.described, torch.bfloat16).train()
    return network, [
        Step(*(torch.cat([getattr(rows, key) for rows in window.micro_batches]) for key in ("input_ids", "labels")))
        for window in islice(data.train, steps)
    ]


if __name__ == "__main__":
    main()
