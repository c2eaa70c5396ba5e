"""Measures runs whose masters and optimizer state are on a drive (weights.drive).

python -m benchmarks.drive --folder /mnt/scratch --part 8b       # memory of a run with Llama-3.1-8B's shapes
python -m benchmarks.drive --folder /mnt/scratch --part 8b-all   # like 8b, with weights.drive_holds=all
python -m benchmarks.drive --folder /mnt/scratch --part 1b       # Llama-3.2-1B: bits of weights, with and without drive
python -m benchmarks.drive --folder /mnt/scratch --part time     # GPT-2 XL: seconds per step, with and without drive

The part `time` also measures which share of the drive's bandwidth a run uses. The parts with 8B parameters need 65 GB
of space on the drive. Of these, 16 GB are for a model with random weights, which the parts write. 8b takes 20 GiB of
memory, and 8b-all takes 8 GiB. A part replaces only its own results in results/drive.json.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks import streamed, turns
from benchmarks.runner import machine, measure, options_of, stored, write
from benchmarks.streamed import QUIET, WARM_UP, Progress, figures_of, recording, running, watched
from lowmem.offload.drive import SwapFiles
from lowmem.system.scratch_file import Drive, buffer
from lowmem.system.units import GIB

RESIDENT_ASKED, SHARE_ASKED, SLOWER_ASKED = 20, 0.85, 1.1
MASTERS = ["precision=bf16-master", "optim=adamw8bit", "clip=null", "loss=tiled", "batch_size=1", "seq_len=512"]
MASTERS += ["gradient_checkpointing=every_layer", "max_steps=3", *QUIET, "lr=1e-5", "scheduler=constant", "log_every=1"]
MASTERS += ["+trainer.limit_val_batches=0"]
MODELS = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b"}


def written(folder: Path, name: str) -> Path:
    """Writes a model with random bf16 weights to `folder`/`name`, with a file for each weight, unless this model is
    already there. Returns its folder. Args: name: a key of MODELS."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from lowmem.config.settle import run_of
    from lowmem.model import loading

    target = folder / name
    if (target / "model.safetensors.index.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    run = run_of([f"model={MODELS[name]}", "model.pretrained=false"])
    config = loading.architecture(run.model)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    places = {}
    for number, (key, p) in enumerate(network.named_parameters()):
        file = f"model-{number:05d}.safetensors"
        drawn = torch.ones(p.shape) if p.dim() == 1 else torch.empty(p.shape).normal_(0.0, config.initializer_range)
        save_file({key: drawn.bfloat16()}, target / file, {"format": "pt"})
        places[key] = file
    config.dtype = torch.bfloat16
    config.save_pretrained(target)
    _bytes_as_tokens().save_pretrained(target)
    index = {"metadata": {}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def _bytes_as_tokens():
    """Returns a tokenizer that has a token for each byte and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>", bos_token="<|end|>")


def _of_folder(model: Path) -> list[str]:
    return ["model=hf", f"model.name={model}", "tokenizer=null"]


def train_three_steps(model: str, *more: str) -> dict:
    """Trains three steps. Returns the losses, the peak bytes, the bytes that the drive read and wrote in each step, and
    a SHA-256 digest of all weights in full precision. For models with 2B parameters or more, this is the digest of
    empty input."""
    from hashlib import sha256

    from lowmem.training import watchers

    moved, digest = [], sha256()

    class Moving(recording(Progress())):
        def on_train_start(self, trainer, module) -> None:
            super().on_train_start(trainer, module)
            moved.append(_moved(module))

        def on_train_batch_end(self, trainer, module, *outputs) -> None:
            moved.append(_moved(module))
            super().on_train_batch_end(trainer, module, *outputs)

        def on_train_end(self, trainer, module) -> None:
            module.arrived()
            # not for 8B: the pages that this loop reads from the drive would raise the peak of resident memory
            for p in module.parameters() if sum(p.numel() for p in module.parameters()) < 2e9 else ():
                digest.update(module.full_precision(p).detach().view(torch.uint8).numpy())

    watchers.Stop = Moving
    with running([*_of_folder(Path(model)), *MASTERS, "weights=streamed", *more]) as run:
        return {
            **figures_of(run),
            "read_written": [[b - a for a, b in zip(x, y, strict=True)] for x, y in pairwise(moved)],
            "drive_bytes": sum(t.nbytes for t in run.module.weights.drive_tensors()),
            "digest": digest.hexdigest(),
        }


def _moved(module) -> tuple[int, int]:
    drive = module.weights.drive
    return (drive.read_bytes, drive.written_bytes) if drive else (0, 0)


def table_of_8b(row: Mapping, holds: str = "state") -> str:
    read, wrote = row["read_written"][-1]
    losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
    seconds = ", ".join(f"{s:.0f}" for s in row["seconds_per_step"])
    resident = row["rss_peak"] / GIB
    return "\n".join(
        [
            f"Llama-3.1-8B's shapes from random weights in bf16, `{' '.join(MASTERS[:6])}`, weights=streamed, "
            f"weights.drive_holds={holds}, on this CPU, nothing saved:",
            "",
            "| parameters, M | losses | s of each step | highest resident GiB | asked | on the drive GiB "
            "| GiB read and written per step | TB written per 1,000 steps |",
            "|---|---|---|---|---|---|---|---|",
            f"| {row['parameters'] / 1e6:,.0f} | {losses} | {seconds} | {resident:.2f}"
            f"{'' if resident <= RESIDENT_ASKED else ' (missed)'} | <= {RESIDENT_ASKED} "
            f"| {row['drive_bytes'] / GIB:.2f} | {read / GIB:.2f}, {wrote / GIB:.2f} | {wrote / 1e9:.1f} |",
        ]
    )


def table_of_1b(rows: Mapping) -> str:
    memory, drive = rows["memory"], rows["drive"]
    same = memory["losses"] == drive["losses"] and memory["digest"] == drive["digest"]
    lines = [
        "Llama-3.2-1B's shapes, the same recipe, three steps. Losses and all weights in full precision are "
        f"**{'the same to the bit' if same else 'NOT the same'}**:",
        "",
        "| masters and state are | losses | s of each step | highest resident GiB | host tensors GiB | on the drive |",
        "|---|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        losses = ", ".join(f"{loss:.6f}" for loss in row["losses"])
        seconds = ", ".join(f"{s:.1f}" for s in row["seconds_per_step"])
        lines.append(
            f"| in {way} | {losses} | {seconds} | {row['rss_peak'] / GIB:.2f} | {row['host_tensors'] / GIB:.2f} "
            f"| {row['drive_bytes'] / GIB:.2f} |"
        )
    return "\n".join(lines)


def table_of_time(results: Mapping) -> str:
    rows, share = results["rows"], results["share"]
    memory, drive = rows["weights.drive=null"], next(rounds for way, rounds in rows.items() if way not in NO_DRIVE)
    slower = turns.speed_ratio(memory, drive, WARM_UP)
    lines = [
        "GPT-2 XL's shapes, 8 blocks, on this CPU, 1 x 256 tokens, bf16-master and adamw8bit, the two in turns:",
        "",
        "| masters and state are | s per step | device GiB | host GiB | resident net of imports GiB | loss |",
        "|---|---|---|---|---|---|",
    ]
    for way, rounds in rows.items():
        figures = rounds[0]
        seconds = median(s for each in rounds for s in each["seconds"][WARM_UP:])
        cells = " | ".join(f"{figures[key] / GIB:.3f}" for key in ("device", "host", "resident"))
        place = "in memory" if way in NO_DRIVE else "on a drive"
        lines.append(f"| {place} | {seconds:.3f} | {cells} | {figures['losses'][-1]:.6f} |")
    return "\n".join(
        [
            *lines,
            "",
            f"With the drive a step takes {slower:.3f} x as long (median over the pairs of steps; asked: at most "
            f"{SLOWER_ASKED}). {share['blocks']} files of {share['bytes'] / share['blocks'] / GIB:.2f} GiB, read all "
            f"at once ({share['read'] / 1e9:.2f} GB/s) and then written ({share['written'] / 1e9:.2f} GB/s), take "
            f"{share['alone']:.2f} s. Their turns, with nothing to compute, took {share['seconds']:.2f}: a share of "
            f"{share['alone'] / share['seconds']:.2f} (asked: at least {SHARE_ASKED}).",
        ]
    )


NO_DRIVE = ("weights.drive=null",)


def in_turn(place: str) -> dict:
    """Runs one of the two loops that take turns after each step. Args: place: `weights.drive=` with a folder or
    null."""
    return streamed.in_turn("weights=streamed", [place])


def share(folder: str, blocks: int = 12, elements: int = 1 << 26) -> dict:
    """Measures how long a drive takes to read and write swap files, without computation. Returns medians.

    `seconds` is the time to read and write all blocks one after the other, as in a step. `alone` is the time to read
    all files at once and then to write all files at once. `read` and `written` are the bytes per second while all files
    are read at once and while all files are written at once.

    Args:
        folder: a folder on the drive.
        blocks: number of swap files.
        elements: number of int32 elements of a swap file.
    """
    drive = Drive(Path(folder))
    every = SwapFiles(drive)
    swap_files = [every.new() for _ in range(blocks)]
    for swap_file in swap_files:
        every.pin(swap_file)
        every.put(swap_file, "weight", {"tensor": torch.randint(1 << 30, (elements,), dtype=torch.int32)})
    every.finish()
    size = sum(swap_file.size for swap_file in swap_files)
    memory = memoryview(buffer(size))
    places = [
        slice(number * swap_file.size, (number + 1) * swap_file.size) for number, swap_file in enumerate(swap_files)
    ]

    def turns_of_all() -> None:
        for swap_file in swap_files:
            every.pin(swap_file)
        every.finish()

    def move_all(move: str) -> None:
        moving = [
            getattr(swap_file._file, move)(0, memory[place])
            for swap_file, place in zip(swap_files, places, strict=True)
        ]
        for each in moving:
            each.result()

    timed: dict[str, list[float]] = {"turns": [], "read": [], "write": []}
    for _ in range(5):
        for name in ("read", "write"):
            timed[name].append(_seconds(partial(move_all, name)))
        timed["turns"].append(_seconds(turns_of_all))
    turns_took, read, wrote = (median(seconds[1:]) for seconds in timed.values())
    taken = {"alone": read + wrote, "seconds": turns_took}
    return {"blocks": blocks, "bytes": size, "read": size / read, "written": size / wrote} | taken


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _row(*arguments: str) -> list[str]:
    return ["-m", "benchmarks.drive", "--row", *arguments]


def _eight(folder: Path, holds: str = "state") -> dict:
    lines = [f"weights.drive={folder}", f"weights.drive_holds={holds}"]
    return watched(_row("train", str(written(folder, "8b")), *lines))


def _measure_1b(folder: Path) -> dict:
    model = str(written(folder, "1b"))
    return {
        "memory": watched(_row("train", model)),
        "drive": watched(_row("train", model, f"weights.drive={folder}")),
    }


def _time(folder: Path) -> dict:
    ways = (*NO_DRIVE, f"weights.drive={folder}")
    rows = turns.measure([{way: _row("turn", way) for way in ways}], 2)
    return {"rows": rows, "share": measure({"share": _row("share", str(folder))}, 1)["share"][0]}


PARTS: dict[str, tuple[Callable[[Path], dict], Callable[[Mapping], str]]] = {
    "8b": (_eight, table_of_8b),
    "8b-all": (partial(_eight, holds="all"), partial(table_of_8b, holds="all")),
    "1b": (_measure_1b, table_of_1b),
    "time": (_time, table_of_time),
}
ROWS = {"train": train_three_steps, "turn": in_turn, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the drive; needed except with --row")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    options = options_of(parser, lambda kind, *arguments: ROWS[kind](*arguments))
    if options.folder is None:
        parser.error("the following arguments are required: --folder")
    results = stored("drive")
    for part in options.part:
        results |= {part: PARTS[part][0](options.folder.absolute()), "machine": machine()}
        write("drive", results, "\n\n".join(PARTS[name][1](results[name]) for name in PARTS if name in results))


if __name__ == "__main__":
    main()
