"""Hooks of pytest, and shared fixtures: for example, a corpus of 12 files, overrides for a model of 43,264 parameters,
and two ways to start a run in this process (by `fit`, and by `train.py` with its arguments)."""

import base64
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread per worker; torch reads the variable when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise torch.compile starts a pool of processes
# torch reads the variable once, at the first matmul on a card, which may be in a test without the fixture
# `deterministic`. The value is torch's default on an H100.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from hydra.core.global_hydra import GlobalHydra

import composing
from lowmem.config import typed_lines as overrides
from lowmem.system import home

# Processes started by `nohup make test &` ignore these signals. Without these lines, runs would also ignore them, and
# tests of signals would hang.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

home.replace_if_read_only()  # before anything imports wandb, matplotlib or datasets
composing.install()


@cache
def _composed(lines, name, whole):
    return pickle.dumps(overrides.composed.now(lines, name, whole))


def composed(lines, name="config", whole=False):
    """Composes a config once per process, and returns copies. If Hydra is already initialized, the config is composed
    again. Hydra needs 0.1 s per config; without the cache, that would be a fifth of the time of all tests."""
    if GlobalHydra.instance().is_initialized():
        return overrides.composed.now(lines, name, whole)
    return pickle.loads(_composed(tuple(lines), name, whole))


composed.now, overrides.composed = overrides.composed, composed  # before another module imports `composed`

import made_runs  # noqa: E402
from lowmem.command import cli  # noqa: E402
from lowmem.config.settle import Run  # noqa: E402
from lowmem.config.typed_lines import key  # noqa: E402

pytest_plugins = ["tiers"]

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `import train`

# Tests must not use an account or the hub, and must not prompt for input.
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true")
os.environ.pop("WANDB_API_KEY", None)
os.environ.pop("COLUMNS", None)  # would wrap messages, so that tests would not find phrases in them

SMALL = (
    "model.architecture.n_embd=32",
    "model.architecture.n_layer=2",
    "model.architecture.n_head=2",
    "model.architecture.vocab_size=300",
    "seq_len=16",
    "batch_size=4",
    "max_steps=4",
    "val_every=100",
    "val_sequences=8",
    "scheduler.warmup_steps=0",
    "log_every=1",
    "sample_tokens=0",
    "logger=csv",
    "device=cpu",
    "plan=off",
)

# An image of one pixel, which `no_picture` writes as memory.png.
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")


def pytest_collection_finish(session):
    """Excludes the millions of objects that exist after test collection from garbage collection, and makes garbage
    collections less frequent. Full garbage collections took a seventh of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 20, 100)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """Returns a folder with twelve text files, whose contents are equal on every machine."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ("def", "return", "self", "for", "in", "if", "else", "class", "import", "x", "=", "(", ")", ":", "0", "1")
    for i in range(12):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(60))
        (folder / f"file{i:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def small(text_folder, tmp_path_factory) -> tuple[str, ...]:
    """Returns overrides for a run that takes less than a second."""
    cache = tmp_path_factory.mktemp("cache")
    return (*SMALL, "data=text", f"data.path={text_folder}", f"cache_dir={cache}")


def beside(base: tuple[str, ...], overrides: tuple[str, ...]) -> list[str]:
    """Returns the overrides in `base`, followed by `overrides`. Leaves out overrides in `base` whose key is in
    `overrides`, and overrides of keys below `model` if `overrides` choose a model."""
    typed = {key(o) for o in overrides}
    if "model" in typed:  # another model has other architecture keys
        base = tuple(o for o in base if not o.startswith("model."))
    return [o for o in base if key(o) not in typed] + list(overrides)


@pytest.fixture
def config(small):
    """Returns a function that takes overrides and returns the config of a small run. The config is not checked, because
    the check refuses fp64, in which some tests compute."""

    def make(*overrides: str, base: tuple[str, ...] = small):
        return Run.from_draft(composed(beside(base, overrides)))

    return make


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Writes a single pixel as memory.png, because drawing the picture takes longer than a small run."""
    monkeypatch.setattr("lowmem.report.picture.memory_picture", lambda file, *_: file.write_bytes(PIXEL))


@pytest.fixture
def fit(small, tmp_path):
    """Returns a function that takes overrides, trains a small run, and returns its summary and output folder."""
    from lowmem.fit import fit

    def run(*overrides: str, folder: str = "run"):
        return fit(composed(beside(small, overrides)), tmp_path / folder), tmp_path / folder

    return run


@pytest.fixture
def command(small, tmp_path, monkeypatch, capsys):
    """Returns a function that runs `python train.py` with these arguments in this process, and returns the exit code
    and all printed text."""
    import train

    def run(*arguments: str, base: tuple[str, ...] | None = small) -> tuple[int, str]:
        """Args: base: overrides that are added, together with the output folders. None: adds neither."""
        folders = (f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep")
        lines = beside(() if base is None else (*base, *folders), arguments)
        lines = sorted(lines, key=lambda a: not a.startswith("-"))
        monkeypatch.setattr(sys, "argv", ["train.py", *lines])
        capsys.readouterr()  # discard the output of fixtures
        code, said = 0, ""
        try:
            cli.start(train.main)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            said = "" if isinstance(stop.code, int | None) else stop.code
        out = capsys.readouterr()
        return code, out.out + out.err + said

    return run


@pytest.fixture(scope="session")
def processes():
    """Returns a multiprocessing context that forks from a server process in which the slow imports are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowmem.fit", "bitsandbytes", "dying", "told", "claiming"])
    return context


@pytest.fixture
def group_of_one():
    """Yields a gloo group whose only rank is this process. After the test, leaves the group with `leave`, as a run
    does, to avoid a deadlock."""
    import torch.distributed as dist

    from lowmem.techniques.strategy.process_group import leave

    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    yield dist.group.WORLD
    gc.collect()  # DDP objects are parts of reference cycles
    leave()


@pytest.fixture
def deterministic():
    """Enables deterministic algorithms. Without them, the backward pass of attention on a card sums in varying
    order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_for_families():
    """Silences the libraries and limits torch to one thread, as the benchmark of architectures does."""
    from benchmarks.architectures import _prepare

    threads = torch.get_num_threads()
    _prepare()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_units(monkeypatch):
    """Simulates a CPU without 16-bit matmul units."""
    monkeypatch.setattr("lowmem.techniques.precision.cpu_products.has_units", lambda dtype: dtype == torch.float32)


@pytest.fixture
def as_with_compiler(monkeypatch):
    """Makes `shutil.which` find every program, so that choices that need a C++ compiler are not refused. The test must
    not compile anything."""
    monkeypatch.setattr("lowmem.config.refusals.shutil.which", lambda name: name)


@pytest.fixture
def without_compiler(monkeypatch):
    """Makes 8-bit optimizers run as torch operators, as on a machine without a compiler."""
    for module in ("adamw8bit", "bitsandbytes_cpu"):
        monkeypatch.setattr(f"lowmem.techniques.optim.{module}.library", lambda *_: None)


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def root_handlers():
    """Removes the handlers that a command adds to the root logger, because pytest closes the stream to which they
    write."""
    before = logging.root.handlers.copy()
    yield
    for handler in logging.root.handlers.copy():
        if handler not in before and not type(handler).__module__.startswith("_pytest"):
            logging.root.removeHandler(handler)
            handler.close()


@pytest.fixture(autouse=True)
def no_rates_are_kept(tmp_path_factory, monkeypatch):
    """Changes the folder in which measured rates are stored, because later plans must not use rates of a machine that
    was busy with tests."""
    monkeypatch.setattr("lowmem.plan.cost.machine.CACHE", tmp_path_factory.getbasetemp() / "rates")
    monkeypatch.setenv("LOWMEM_RATES", str(tmp_path_factory.getbasetemp() / "rates"))


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Returns a folder with three finished runs (the second needs more memory than the first and is slower), a failed
    run, a running run and two broken runs."""
    return made_runs.sweep(tmp_path / "sweep")


@pytest.fixture
def fifty(tmp_path) -> Path:
    """Returns a folder with fifty runs that differ in five overrides, some of which are long. Two of the runs
    failed."""
    return made_runs.fifty(tmp_path / "fifty-runs-in-a-folder-with-a-long-name")
