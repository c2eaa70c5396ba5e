"""Runs one case of a stage, a function that returns figures, in a process of its own.

    python -m benchmarks.card.case <module of the stage> <case> <device> <folder of text>

The result is written to result.json in the folder that the environment variable ROW_FOLDER names. It is not printed,
because libraries print lines of their own when a process ends.
"""

import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from lowmem.report.summary import write
from lowmem.system.without_gc import undisturbed

RESULT, UNFINISHED = "result.json", "unfinished"


class LeftOut(Exception):
    """Raised with the reason when a case cannot be run here."""


@dataclass(frozen=True)
class Size:
    """Holds the sizes that differ between a card and a rehearsal without one."""

    whole: bool  # True runs every case, False one of each kind
    patience: float  # multiplies the time limits of stages and cases: a rehearsal may run on a busy machine
    side: int  # rows and columns of the matrices that are multiplied
    moved: int  # bytes that go over the link at once
    touched: int  # GiB of the host's memory that are written to, to see whether they exist
    tries: int  # steps of the search for the smallest cap that works, after the planned one
    state: int  # bytes of an optimizer state that does not fit on the card next to the filler
    small: tuple[str, ...]  # overrides that make a recipe of GPT-2 small
    bits: tuple[str, ...]  # the model of runs that are compared bit for bit; they write checkpoints
    model: tuple[str, ...]  # the model of runs that are timed
    cap: str  # memory cap for that model under which not every micro-batch fits
    limit: str  # memory cap under which GPT-2 runs out of memory in its first step
    loops: tuple[tuple[str, str, float], ...]  # (recipe, model, GiB of the card for all four) of benchmarks.loops
    rounds: int
    preset: tuple[str, ...]  # overrides of the preset of GPT-2 XL
    steps: int  # optimizer steps of that preset
    effective: int  # sequences per optimizer step where batch_size=auto chooses the micro-batch
    chosen: tuple[str, ...]  # typed with plan=auto: settings that the planner may not choose


DRY = tuple(f"model.architecture.{kind}_pdrop=0.0" for kind in ("resid", "embd", "attn"))
THIN = tuple(f"model.architecture.{line}" for line in ("n_layer=2", "n_embd=64", "n_head=2", "vocab_size=512"))
MIDDLE = (
    *("model=gpt2", "model.pretrained=false", "model.architecture.n_layer=6", "model.architecture.n_embd=512"),
    *("model.architecture.n_head=8", "model.architecture.vocab_size=4096"),
)
SIZES = {
    "cuda": Size(
        whole=True,
        patience=1,
        side=8192,
        moved=1 << 30,
        touched=24,
        tries=2,
        state=1 << 30,
        small=(),
        bits=(*MIDDLE, "seq_len=512", "batch_size=8"),
        # half of the blocks, 204M parameters: checkpoints do not take longer than the steps
        model=(
            *("model=gpt2-medium", "model.pretrained=false", "model.architecture.n_layer=12"),
            *("seq_len=1024", "batch_size=8", "loss=chunked"),
        ),
        cap="8GiB",
        limit="1GiB",
        loops=(("bf16", "124M", 48), ("32", "13.9M", 8)),
        rounds=2,
        preset=(),
        steps=30,
        effective=64,
        chosen=(),
    ),
    "cpu": Size(
        whole=False,
        patience=4,
        side=64,
        moved=1 << 18,
        touched=0,
        tries=0,
        state=1 << 20,
        small=(*THIN, "seq_len=16", "batch_size=4", "val_sequences=4"),
        bits=("model=gpt2", "model.pretrained=false", *THIN, "seq_len=16", "batch_size=4"),
        model=("model=gpt2", "model.pretrained=false", *THIN, "seq_len=16", "batch_size=4"),
        cap="6MiB",
        limit="300KiB",
        loops=(("32", "thin", 0),),
        rounds=1,
        preset=(*THIN, *DRY, "seq_len=16", "batch_size=2", "accumulation.size=4"),
        steps=3,
        effective=8,
        chosen=("precision=bf16", "optim=adamw", "gradient_checkpointing=none"),
    ),
}


@dataclass(frozen=True)
class Here:
    """Holds a case's surroundings. Args: folder: the case's own; text: the training text, the same for all cases."""

    device: str
    size: Size
    folder: Path
    text: Path

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"

    @property
    def memory(self) -> int:
        """Returns the bytes of the card, or, without a card, more than any card has."""
        import torch

        return torch.cuda.get_device_properties(0).total_memory if self.on_card else 1 << 40

    def release(self) -> None:
        """Frees the card's memory that this process caches, so that the next run starts with an empty card."""
        import gc

        import torch

        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()

    def typed(self) -> list[str]:
        """Returns overrides for every command line: made-up text, so nothing is downloaded, and no W&B."""
        data = ["data=text", f"data.path={self.text}", f"cache_dir={self.text.parent / 'tokens'}"]
        return [*data, f"device={self.device}", "logger=csv", "sample_tokens=0"]

    def keep(self, result: dict) -> None:
        """Writes the result so far, in case this process ends early."""
        write(self.folder / RESULT, {"status": UNFINISHED, "result": result})

    def train(self, *typed: str, folder: str = "run") -> dict:
        """Runs train.py with these overrides in this process and returns its summary."""
        from benchmarks.runner import run_train

        os.environ["ROW_FOLDER"] = str(self.folder / folder)
        return run_train([*self.typed(), *typed])

    def config(self, *typed: str, base: tuple[str, ...] = ()):
        """Returns the config of a run. Args: base: overrides that come before the others, as in the tests' fixture.

        Raises:
            LeftOut: the optimizer's library is not installed.
        """
        from lowmem.config.settle import run_of

        cfg = run_of([*base, *typed, f"device={self.device}"])
        library = cfg.optim.target.split(".")[0]
        if find_spec(library) is None:
            raise LeftOut(f"{library} is not installed")
        return cfg


@dataclass(frozen=True)
class Case:
    """Describes a case.

    Args:
        seconds: its time limit.
        imports: the module that its process imports before it runs.
        environment: environment variables that its process begins with, for what torch reads when it is imported.
    """

    run: Callable[[Here], dict]
    seconds: float
    imports: str = "lowmem.fit"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Describes a module of this package that has `cases(size)`, `says(results)` and `table(results)`.

    Args:
        seconds: the time limit, after which no case is begun and running cases are ended.
        together: cases that may run at once; more than one only where nothing is timed.
        gib: GiB that the card must have for each case that runs at once.
    """

    number: int
    name: str
    module: str
    seconds: float
    together: int = 1
    gib: float = 0.0

    def cases(self, size: Size) -> Mapping[str, Case]:
        return import_module(self.module).cases(size)


WORDS = 3000  # vocabulary of the text, as frequent as in a language: the n-th is drawn 1/n as often as the first


def text(folder: Path, files: int = 24, lines: int = 2000) -> Path:
    """Writes files of made-up sentences, about 100 kB each and the same on every machine, and returns the folder."""
    letters = random.Random(0)
    words = ["".join(letters.choices("aeioulnrstmdkp", k=letters.randint(2, 9))) for _ in range(WORDS)]
    shares = [1 / n for n in range(1, WORDS + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        file, draw = folder / f"{number:02d}.txt", random.Random(number)
        if not file.exists():
            said = (" ".join(draw.choices(words, shares, k=draw.randint(4, 14))) for _ in range(lines))
            draft = file.with_suffix(".writing")
            draft.write_text(".\n".join(said))
            os.replace(draft, file)
    return folder


def main() -> None:
    module, name, device, words = sys.argv[1:]
    here = Here(device, SIZES[device], Path(os.environ["ROW_FOLDER"]), Path(words))
    case = import_module(module).cases(here.size)[name]
    with undisturbed():
        import_module(case.imports)
    try:
        record = {"status": "done", "result": case.run(here)}
    except LeftOut as why:
        record = {"status": "left out", "why": str(why)}
    write(here.folder / RESULT, record)


if __name__ == "__main__":
    # imported by its full name, as the stages do: otherwise there would be two classes LeftOut
    from benchmarks.card import case

    case.main()
