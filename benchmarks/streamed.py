"""Measures the memory, the copied bytes and the time of runs with streamed weights (weights=streamed).

python -m benchmarks.streamed --part 8b        # trains Llama-3.1-8B from random weights: 20 minutes, 21 GiB of memory
python -m benchmarks.streamed --part reach     # predicts device and host bytes from shapes: no memory, some minutes
python -m benchmarks.streamed --part cpu       # compares with resident weights, on an idle machine: 10 minutes, 6 GiB
python -m benchmarks.streamed --part window    # like cpu, with windows of 8 micro-batches: 10 minutes, 6 GiB
python -m benchmarks.streamed --part link      # compares copied bytes with the formula: seconds
python -m benchmarks.streamed --part picture   # draws docs/streamed-step.png: a minute

Without --part, all parts run one after the other. A part replaces only its own results in results/streamed.json.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from benchmarks import anatomy, capacity, turns
from benchmarks.runner import ROOT, environment, machine, measure, options_of, result, stored, write
from lowmem.plan.target import Target
from lowmem.system.units import GIB, MIB

QUIET = ["sample_tokens=0", "val_every=1000", "val_sequences=1", "save_every=1000", "logger=none", "plan=off"]

STREAMED = "weights=streamed"


@contextmanager
def running(lines: Sequence[str]) -> Iterator["Training"]:  # noqa: F821
    """Context manager that trains like train.py and yields the finished training. It writes no checkpoint and no
    export, each of which would take 16 GB for 8B parameters."""
    from lowmem.config.check import check
    from lowmem.config.settle import run_of
    from lowmem.plan.job import resolved
    from lowmem.system.quiet_libraries import quiet
    from lowmem.training import training

    cfg = resolved(run_of(lines), on_card=False)
    check(cfg, {})
    quiet()
    with training.training_session(cfg, Path(os.environ["ROW_FOLDER"]), keeps=False) as run:
        yield run


# --- 8B, trained here -------------------------------------------------------------------------------------------------

LLAMA = ["model=llama-3.1-8b", "model.pretrained=false"]
NO_MASTERS = ["precision=bf16-sr", "optim=adafactor", "weights=streamed", "loss=tiled", "clip=null", "batch_size=1"]
EIGHT = [
    *(*LLAMA, *NO_MASTERS, "gradient_checkpointing=every_layer", "seq_len=512", "max_steps=3", *QUIET),
    *("lr=1e-4", "scheduler=constant", "log_every=1", "+trainer.limit_val_batches=0"),
]
SMALLER = [f"model.architecture.{d}" for d in ("hidden_size=1024", "intermediate_size=3584", "num_hidden_layers=8")]
SMALLER += [f"model.architecture.{d}" for d in ("num_attention_heads=8", "num_key_value_heads=2")]
RESIDENT_ASKED = 21 * GIB
ENDED = 0.5 * GIB  # available host memory below which the run is killed, before the kernel kills another process


class Progress:
    """Prints messages of a long run to stderr. Each message is preceded by the seconds since this object was created
    and by the resident memory of the process."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self, message: str) -> None:
        seconds, resident = time.perf_counter() - self.start, psutil.Process().memory_info().rss
        print(f"{seconds:7.1f} s  {resident / GIB:5.2f} GiB  {message}", file=sys.stderr, flush=True)


def recording(tell: Progress) -> type:
    """Returns a subclass of `watchers.Stop` that prints the progress of a run, and that records the losses and times
    of its steps for `figures_of`."""
    from lowmem.training import watchers

    class Recording(watchers.Stop):
        def on_fit_start(self, *_) -> None:
            self.losses, self.moments = [], []
            tell("the model is built, and its weights have moved in")

        def on_train_start(self, trainer, module) -> None:
            super().on_train_start(trainer, module)
            self.moments.append(time.perf_counter())

        def on_before_backward(self, trainer, module, loss) -> None:
            tell(f"step {trainer.global_step + 1}: forward done")

        def on_train_batch_end(self, trainer, module, outputs: dict, *_) -> None:
            self.losses.append(float(outputs["loss"]))
            self.moments.append(time.perf_counter())
            tell(f"step {trainer.global_step}: loss {self.losses[-1]:.6f}")
            super().on_train_batch_end(trainer, module)

    tell("starts")
    return Recording


def figures_of(run: "Training") -> dict:  # noqa: F821
    """Returns figures of a run, such as losses, seconds of each step and peak bytes. Before the run, `watchers.Stop`
    must have been replaced by a class that `recording` returned."""
    stop, meter = run.watchers.stop, run.watchers.meter
    return {
        "parameters": sum(p.numel() for p in run.module.parameters()),
        "losses": stop.losses,
        "seconds_per_step": [after - before for before, after in pairwise(stop.moments)],
        "peak_bytes": meter.peak_bytes,
        "host_tensors": max(row.get("host_tensor_bytes", 0) for row in meter.rows()),
    }


def eight(more: Sequence[str] = ()) -> dict:
    from lowmem.training import watchers

    tell = Progress()
    watchers.Stop = recording(tell)
    with running([*EIGHT, *more]) as run:
        tell("trained")
        return {
            **figures_of(run),
            "seconds": time.perf_counter() - tell.start,
            "peak_bytes_by_phase": run.watchers.meter.by_phase(),
            "peak_bytes_by_category": run.watchers.meter.by_category(),
            "rss_before_model": run.rss_before_model,
        }


def watched(arguments: Sequence[str]) -> dict:
    """Runs a row in a separate process. Returns its result, with two further values in bytes: the peak resident memory
    of the process (`rss_peak`), and the least memory that the machine had available meanwhile (`least_available`).

    Raises:
        SystemExit: the row failed, or was killed because less than ENDED bytes of memory were available.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stdout"
        with out.open("w") as stdout:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(folder), stdout=stdout)
        child, highest, least = psutil.Process(process.pid), 0, psutil.virtual_memory().available
        while process.poll() is None:
            highest = max(highest, _resident(child))
            least = min(least, psutil.virtual_memory().available)
            if least < ENDED:
                process.kill()
                raise SystemExit(f"ended: {highest / GIB:.2f} GiB resident, and the machine has no memory left")
            time.sleep(0.02)
        row = result(arguments, process.wait(), out.read_text(), "")
    return row | {"rss_peak": highest, "least_available": least}


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # the process has just ended
        return 0


def table_of_eight(row: Mapping) -> str:
    losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
    seconds = ", ".join(f"{s:.0f}" for s in row["seconds_per_step"])
    mark = "" if row["rss_peak"] <= RESIDENT_ASKED else " (missed)"
    return "\n".join(
        [
            f"`{' '.join(EIGHT)}`, on this CPU, from a random start, nothing saved:",
            "",
            "| parameters, M | losses | s of each step | s in all | highest resident GiB | asked | device GiB |",
            "|---|---|---|---|---|---|---|",
            f"| {row['parameters'] / 1e6:,.0f} | {losses} | {seconds} | {row['seconds']:.0f} "
            f"| {row['rss_peak'] / GIB:.2f}{mark} | <= 21 | {row['peak_bytes']['device'] / GIB:.2f} |",
        ]
    )


# --- bytes by shape ---------------------------------------------------------------------------------------------------

XL = ["model=gpt2-xl", "model.pretrained=false"]
XL += [f"model.architecture.{drop}=0.0" for drop in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
SEVENTY = ["hidden_size=8192", "intermediate_size=28672", "num_hidden_layers=80", "num_attention_heads=64"]
MASTERS = ["precision=bf16-master", "optim=adamw8bit", "clip=null", "loss=tiled"]
BY_SHAPE = ["gradient_checkpointing=offload", "data=random", *QUIET]


def _size(batch_size: int, seq_len: int) -> list[str]:
    return [f"batch_size={batch_size}", f"seq_len={seq_len}"]


# name -> (overrides, device limit in GiB, bytes of host memory per parameter, GiB of host memory). The host limit is
# the sum of the last two terms.
REACH = {
    "GPT-2 XL, 4 x 1024, bf16-master, adamw8bit": ([*XL, *MASTERS, *_size(4, 1024)], 1.1, 6.03, 2),
    "Llama-3.1-8B, 1 x 2048, the same": ([*LLAMA, *MASTERS, *_size(1, 2048)], 2.8, 6.03, 4),
    "Llama-3.1-8B, 1 x 4096, the same": ([*LLAMA, *MASTERS, *_size(1, 4096)], 3.5, 6.03, 5),
    "Llama-3.1-8B, 1 x 512, bf16-sr, adafactor": ([*LLAMA, *NO_MASTERS, *_size(1, 512)], 2.5, 2.0, 6),
    "70B, 1 x 2048, bf16-master, adamw8bit": (
        [*LLAMA, *(f"model.architecture.{dimension}" for dimension in SEVENTY), *MASTERS, *_size(1, 2048)],
        *(9, 6.03, 8),
    ),
}


def by_shape(name: str, weights: str) -> dict:
    from lowmem.config.settle import run_of
    from lowmem.plan.job import resolved
    from lowmem.plan.prediction import predict

    typed = [line for line in REACH[name][0] if line != STREAMED]  # the fourth row contains it already
    prediction = predict(resolved(run_of([*typed, weights, *BY_SHAPE]), on_card=True), Target(on_card=True))
    return {
        "parameters": prediction.parameters,
        "device": prediction.allocated,
        "need": prediction.device.total,
        "phase": prediction.device.phase,
        "categories": capacity.by_category(prediction),
        "host": max(need.host for need in prediction.phases.values()),
        "host_phases": {phase: need.host for phase, need in prediction.phases.items()},
        "host_categories": prediction.host.rows,
        "estimate": prediction.estimate,
    }


def table_of_reach(results: Mapping) -> str:
    columns = ("weights", "gradients", "optimizer", "activations", "other")
    lines = [
        "Predicted by shape (fake tensors), for a card; `gradient_checkpointing=offload loss=tiled clip=null`:",
        "",
        f"| run | weights are | device GiB | asked | {' | '.join(columns)} | in | host GiB | asked |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (_, device, rate, besides) in REACH.items():
        for way, run in results[name].items():
            host = rate * run["parameters"] / GIB + besides
            streamed = way == STREAMED
            limits = [
                f"<= {device}{_missed(run['device'] / GIB, device)}",
                f"<= {host:.1f}{_missed(run['host'] / GIB, host)}",
            ]
            cells = [f"{run['categories'][column] / GIB:.2f}" for column in columns]
            lines.append(
                f"| {name} | {way.split('=')[1]} | {run['device'] / GIB:.2f} | {limits[0] if streamed else '-'} "
                f"| {' | '.join(cells)} | {run['phase']} | {run['host'] / GIB:.1f} | {limits[1] if streamed else '-'} |"
            )
    return "\n".join(lines)


def _missed(value: float, limit: float) -> str:
    return "" if value <= limit else " (missed)"


# --- time beside resident weights -------------------------------------------------------------------------------------

STEPS, WARM_UP = 24, 3
ON_CPU = [
    *(*XL, "model.architecture.n_layer=8", *MASTERS, "loss=chunked", "gradient_checkpointing=every_layer"),
    *("batch_size=1", "seq_len=256", f"max_steps={STEPS}", "lr=5e-5", "scheduler=constant", *QUIET),
]
SLOWER_ASKED, AGREES = 1.05, 0.05
PHASES = ("forward", "backward", "step")


def in_turn(weights: str, more: Sequence[str] = ()) -> dict:
    """Trains ON_CPU, taking turns with the other runs of the same part after each step. Returns the times and losses,
    and the peak bytes of device tensors, of host tensors and of resident memory (without imports)."""
    from lowmem.training import watchers

    mine = turns.Turns()

    class InTurn(watchers.Stop):
        def on_train_batch_start(self, *_) -> None:
            mine.next()

    watchers.Stop = InTurn
    with running([*ON_CPU, weights, *more]) as run:
        tokens = run.module.tokens / run.trainer.global_step
        rows = [row for row in run.watchers.meter.rows() if row["phase"] in PHASES and "live_peak_bytes" in row]
        top = max(rows, key=lambda row: row["live_peak_bytes"])
        return {
            "seconds": mine.seconds,
            "tokens_per_second": tokens / median(mine.seconds[WARM_UP:]),
            "losses": [float(run.watchers.metrics.train_loss)],
            "device": top["live_peak_bytes"],
            "host": top["host_tensor_bytes"],
            "resident": max(row["rss_peak_bytes"] for row in rows) - run.rss_before_model,
        }


def table_of_cpu(results: Mapping) -> str:
    streamed, resident = ([*results[way]] for way in (STREAMED, "weights=resident"))
    slower = turns.speed_ratio(resident, streamed, WARM_UP)
    lines = [
        "GPT-2 XL's shapes, 8 blocks, on this CPU, 1 x 256 tokens, bf16-master and adamw8bit, the two in turns:",
        "",
        "| weights are | s per step | device GiB | host GiB | counted in all | resident net of imports GiB | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, rounds in results.items():
        figures = rounds[0]
        seconds = median(s for each in rounds for s in each["seconds"][WARM_UP:])
        counted = figures["device"] + figures["host"]
        sizes = [figures["device"], figures["host"], counted, figures["resident"]]
        cells = " | ".join(f"{size / GIB:.3f}" for size in sizes)
        lines.append(f"| {way.split('=')[1]} | {seconds:.3f} | {cells} | {figures['losses'][-1]:.6f} |")
    counted = _counted(streamed[0]) / _counted(resident[0])
    measured = streamed[0]["resident"] / resident[0]["resident"]
    off = measured / counted - 1
    return "\n".join(
        [
            *lines,
            "",
            f"A step with streamed weights takes {slower:.3f} x as long as with resident ones (median over the pairs "
            f"of steps; asked: at most {SLOWER_ASKED}{_missed(slower, SLOWER_ASKED)}). Of a resident run's bytes a "
            f"streamed one has {counted:.3f} x by the tracker and {measured:.3f} x by the system, {off:+.1%} apart "
            f"(asked: at most {AGREES:.0%}{_missed(abs(off), AGREES)}).",
        ]
    )


# --- windows of several micro-batches ---------------------------------------------------------------------------------

OF_EIGHT = ["gradient_checkpointing=offload", "accumulation=fixed", "accumulation.batches=8", "clip=null"]
OF_EIGHT += ["max_steps=5"]
ORDERS = ("weights=resident", STREAMED, "weights=streamed weights.order=by_micro_batch")


def in_windows(way: str) -> dict:
    weights, *order = way.split()
    return in_turn(weights, [*order, *OF_EIGHT])


def table_of_windows(results: Mapping) -> str:
    resident = results[ORDERS[0]]
    lines = [
        "The same shapes in windows of 8 micro-batches, clip=null, gradient_checkpointing=offload, the three in turns. "
        "Without another word a window goes by layer:",
        "",
        "| weights are | s per window | x resident | device GiB | host GiB | both | net of imports GiB | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, rounds in results.items():
        figures, slower = rounds[0], turns.speed_ratio(resident, rounds, 1)
        seconds = median(s for each in rounds for s in each["seconds"][1:])
        sizes = [figures["device"], figures["host"], _counted(figures), figures["resident"]]
        cells = " | ".join(f"{size / GIB:.3f}" for size in sizes)
        lines.append(f"| {way} | {seconds:.2f} | {slower:.3f} | {cells} | {figures['losses'][-1]:.6f} |")
    return "\n".join(lines)


def _counted(figures: Mapping) -> int:
    return figures["device"] + figures["host"]


# --- the link ---------------------------------------------------------------------------------------------------------

BLOCKS = 6
SMALL = [f"model.architecture.n_layer={BLOCKS}", "model.architecture.n_embd=256", "seq_len=128", "batch_size=2"]
SMALL += ["precision=bf16-master", "optim=adamw8bit", "clip=null", "gradient_checkpointing=every_layer", "loss=chunked"]
SMALL += ["max_steps=3", *QUIET]
WINDOWS = (1, 4)  # micro-batches per accumulation window


def counted(micro_batches: int) -> dict:
    """Returns the bytes that are copied in the last of three accumulation windows, and the sizes from which
    `table_of_link` computes the expected bytes."""
    from lowmem.offload import master_weights
    from lowmem.offload.copy_lanes import AtOnceLane
    from lowmem.offload.link import StagedLink
    from lowmem.training import watchers

    class Counting(AtOnceLane):
        """Counts copied bytes: of gradients to the host ("down"), of the weights of blocks to the device ("blocks"),
        and of other weights to the device ("others"). `staged` has the addresses of staging memory, through which
        gradients and the weights outside of blocks are copied."""

        def __init__(self) -> None:
            self.staged, self.bytes = set(), {"blocks": 0, "down": 0, "others": 0}

        def staging(self, size: int):
            memory = super().staging(size)
            self.staged.add(memory.untyped_storage().data_ptr())
            return memory

        def copy(self, to, source, after):
            down, other = (t.untyped_storage().data_ptr() in self.staged for t in (to, source))
            self.bytes["down" if down else "others" if other else "blocks"] += source.nbytes
            return super().copy(to, source, after)

    lane = Counting()

    class Watching(watchers.Stop):
        def setup(self, trainer, module, stage) -> None:
            module.weights.lane = lane

        def on_train_batch_start(self, *_) -> None:
            lane.bytes = dict.fromkeys(lane.bytes, 0)

        def on_train_end(self, trainer, module) -> None:
            module.arrived()
            self.seen = dict(lane.bytes)

    watchers.Stop = Watching
    master_weights.link_to = lambda _: StagedLink(lane)
    window = ["accumulation=fixed", f"accumulation.batches={micro_batches}"]
    with running([*SMALL, STREAMED, *window, "+trainer.limit_val_batches=0"]) as run:
        host_blocks = run.module.weights.host_blocks
        return {
            "streamed": sum(place.size for host_block in host_blocks for place in host_block.spans.values()),
            "trained": 2 * sum(p.numel() for p in run.module.parameters()),
            "blocks": len(host_blocks),
            "micro_batches": micro_batches,
            "bytes": run.watchers.stop.seen,
        }


def table_of_link(results: Mapping) -> str:
    lines = [
        f"Bytes over the link, counted by a lane that counts, of one window of a model of {BLOCKS} blocks. Up: "
        "2 x (2n - 1) / n per streamed parameter and micro-batch, less where the first block stays from one to the "
        "next; down: 2 per trained parameter and micro-batch; up besides: whatever else comes, such as weights outside "
        "the blocks.",
        "",
        "| micro-batches | up MiB | by the formula | ratio | down MiB | by the formula | ratio | up besides MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (row,) in results.values():
        n, m, copied = row["blocks"], row["micro_batches"], row["bytes"]
        up, down = m * (2 * n - 1) / n * row["streamed"], m * row["trained"]
        pairs = ((copied["blocks"], up), (copied["down"], down))
        cells = " | ".join(f"{a / MIB:.2f} | {b / MIB:.2f} | {a / b:.3f}" for a, b in pairs)
        lines.append(f"| {m} | {cells} | {copied['others'] / MIB:.2f} |")
    return "\n".join(lines)


# --- the picture ------------------------------------------------------------------------------------------------------

DEEP = ["model.architecture.n_layer=8", "model.architecture.n_embd=384", "model.architecture.n_head=6"]
DEEP += ["precision=bf16-master", "optim=adamw8bit", "clip=null", "gradient_checkpointing=every_layer", "loss=tiled"]
DEEP += ["loss.columns=512", "batch_size=2", "max_steps=3", *QUIET]


def step_of(weights: str) -> dict:
    """Trains a small model. Returns the number of its parameters, and `points`, a list with an element [phase, bytes of
    each category in CATEGORIES] for each allocation or release in the last sampled step."""
    from lowmem.system.units import CATEGORIES

    with running([*DEEP, weights, "+trainer.limit_val_batches=0"]) as run:
        points = [
            [point.phase, *(point.bytes[category] for category in CATEGORIES)] for point in run.watchers.meter.timeline
        ]
    return {"points": points, "parameters": sum(p.numel() for p in run.module.parameters())}


def table_of_picture(results: Mapping) -> str:
    peaks = {way.split("=")[1]: max(sum(point[1:]) for point in row["points"]) for way, (row,) in results.items()}
    text = ", ".join(f"{way} {peak / MIB:.1f} MiB" for way, peak in peaks.items())
    return f"docs/streamed-step.png: device memory inside one step of a model of 8 blocks, at its highest: {text}."


# --- parts ------------------------------------------------------------------------------------------------------------

WAYS = (STREAMED, "weights=resident")


def _row(*arguments: str) -> list[str]:
    return ["-m", "benchmarks.streamed", "--row", *arguments]


def _reach() -> dict:
    return {name: {way: measure({way: _row("reach", name, way)}, 1)[way][0] for way in WAYS} for name in REACH}


def _picture() -> dict:
    results = measure({way: _row("picture", way) for way in WAYS}, 1)
    by_way = {way.split("=")[1]: rounds for way, rounds in results.items()}
    anatomy.draw(by_way, ROOT / "docs" / "streamed-step.png", ["resident", "streamed"], 2)
    return {
        way: [{"points": [max(row["points"], key=lambda point: sum(point[1:]))]} for row in rounds]
        for way, rounds in results.items()
    }


# name of a part -> (the function that measures it, the function that makes its table)
PARTS: dict[str, tuple[Callable[[], dict], Callable[[Mapping], str]]] = {
    "8b": (lambda: watched(_row("8b")), table_of_eight),
    "reach": (_reach, table_of_reach),
    "cpu": (lambda: turns.measure([{way: _row("cpu", way) for way in WAYS}], 2), table_of_cpu),
    "window": (lambda: turns.measure([{way: _row("window", way) for way in ORDERS}], 1), table_of_windows),
    "link": (lambda: measure({str(m): _row("link", str(m)) for m in WINDOWS}, 1), table_of_link),
    "picture": (_picture, table_of_picture),
}
ROWS = {
    "8b": eight,
    "reach": by_shape,
    "cpu": in_turn,
    "window": in_windows,
    "link": lambda m: counted(int(m)),
    "picture": step_of,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--table", action="store_true", help="only the tables again, from earlier measurements")
    options = options_of(parser, lambda kind, *arguments: ROWS[kind](*arguments))
    results = stored("streamed")
    for part in [] if options.table else options.part:
        results |= {part: PARTS[part][0](), "machine": machine()}
        write("streamed", results, "\n\n".join(PARTS[name][1](results[name]) for name in PARTS if name in results))
    if options.table:
        write("streamed", results, "\n\n".join(PARTS[name][1](results[name]) for name in PARTS if name in results))


if __name__ == "__main__":
    main()
