"""Trains on several ranks, which are processes that communicate over gloo and stay alive between tests. Tests compare
the results with those of one process.

Each rank trains a `Case` with lowmem's module and Lightning's trainer, and returns `Seen.answer` and counts of steps
and tokens. `alone` trains the rows of all ranks in the calling process.
"""

import os
import time
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

import in_float64
import parity
import streams
from lowmem.command.launch import free_port
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.data.loader import WindowLoader
from lowmem.data.packing import with_positions
from lowmem.memory.ledger import plain_tensors
from lowmem.model import loading
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.techniques.loss.cross_entropy import Function, Verified
from lowmem.techniques.strategy.process_group import process_group
from lowmem.training import build
from networks import fp64_loss

LIMIT = 60  # time limit of a case, in seconds
IMPORTS = 300  # time limit for the start of a process on a busy machine, in seconds
AFTER = 5  # time limit for the other ranks after one rank has failed or refused, in seconds

# Two blocks and two key-value heads, so that two ranks can divide the blocks or the heads.
BASE = (
    *parity.BASE,
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_key_value_heads=2",
    "max_steps=4",
    "clip=null",
    "sample_tokens=0",
    "plan=off",
)
EXACT = (in_float64.LINE, "optim=adamw", "optim.weight_decay=0.1", "lr=1e-3")
DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")  # 0, because ranks draw different masks
PLAIN = ("optim=sgd", "optim.weight_decay=0.1", "lr=1e-1")


@dataclass(frozen=True)
class Case:
    """A training that can run on several ranks or in one process.

    Args:
        lines: overrides in addition to BASE (with a `network`, to `parity.BASE`), including the strategy.
        together: number of rows of a micro-batch, summed over all data ranks.
        network: key of `streams.MODELS`; None: the model of BASE.
        from_data: True takes the rows from `cfg.data`; False takes the rows from `parity.rows_for`.
        overflow: (window from 0, rank, where): makes gradients of this window on this rank overflow. where: "loss"
            multiplies the loss by 1e30; "element" sets one element of the rank's gradients to infinity. None: no
            overflow.
        wrong: key of WRONG, the deliberate mistake that the ranks make; None: no mistake.
        apart: True makes `alone` train each rank's rows as a separate micro-batch, for losses that are not sums over
            rows.
        counted: True counts the collectives of each window by name.
    """

    lines: tuple[str, ...] = ()
    together: int = 4
    network: str | None = None
    from_data: bool = False
    overflow: tuple[int, int, str] | None = None
    wrong: str | None = None
    apart: bool = False
    counted: bool = False


@dataclass(frozen=True)
class Fitted:
    """Arguments of a complete run by `fit`.

    Args:
        lines: overrides.
        folder: run folder.
        drawn_anew: True is a deliberate mistake: a resumed run does not restore the states of random number generators.
    """

    lines: tuple[str, ...]
    folder: str
    drawn_anew: bool = False


class Failed(Exception):
    """Raised if a rank failed. The message contains the traceback or the refusal of each failed rank, or says that a
    rank did not start, is gone or did not answer in time."""


class Ranks:
    """The processes of all ranks. They start with the first case, and start anew with the next case after a failure.

    Args:
        context: multiprocessing context.
        size: number of processes.
    """

    def __init__(self, context, size: int) -> None:
        self.context, self.size = context, size
        self.processes, self.calls = [], []

    def __call__(self, case: Case | Fitted) -> list[dict]:
        """Returns the answer of each rank.

        Raises:
            Refused: all ranks refused the case.
            Failed: a rank failed, or only some ranks refused the case. All processes are killed.
        """
        if not self.processes:
            self._start()
        port = free_port()
        for call in self.calls:
            call.send((case, port))
        answers = self._answers()
        if all(isinstance(answer, Refused) for answer in answers):
            raise answers[0]
        if failed := [answer for answer in answers if not isinstance(answer, dict)]:
            self.close()
            raise Failed("\n".join(map(str, failed)))
        return answers

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=live, args=(theirs, rank, self.size), daemon=True)
            process.start()
            self.processes.append(process)
            self.calls.append(ours)
        for call in self.calls:
            if not call.poll(IMPORTS):
                self.close()
                raise Failed("A rank did not start.")
            call.recv()

    def _answers(self) -> list:
        answers, until = [None] * self.size, time.monotonic() + LIMIT
        while time.monotonic() < until and None in answers:
            for rank, call in enumerate(self.calls):
                if answers[rank] is None and call.poll(0.02):
                    try:
                        answers[rank] = call.recv()
                    except EOFError:
                        answers[rank] = f"Rank {rank} is gone."
                    if not isinstance(answers[rank], dict):
                        until = min(until, time.monotonic() + AFTER)
        return [f"Rank {n} hangs: no answer in time." if one is None else one for n, one in enumerate(answers)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.calls = [], []


def live(calls, rank: int, size: int) -> None:
    quiet()
    torch.set_num_threads(1)
    calls.send("ready")
    while True:
        try:
            case, port = calls.recv()
        except EOFError:
            return
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in world.items()})
        try:
            calls.send(trained(case) if isinstance(case, Case) else fitted(case))
        except Refused as error:
            calls.send(error)
        except BaseException:
            calls.send(f"Rank {rank}: {traceback.format_exc()}")


def _lines(case: Case, *more: str) -> tuple[str, ...]:
    """Returns the overrides of a case, one per key. If several lines set a key, the last line replaces the first, and
    the other lines are dropped."""
    typed = (*(BASE if case.network is None else parity.BASE), *case.lines, *more)
    last = {line.split("=")[0]: line for line in typed}
    return tuple(last.values())


def composed(case: Case):
    cfg = run_of(_lines(case))
    batch_size = case.together // cfg.data_ranks
    cfg = run_of(_lines(case, f"batch_size={batch_size}"))
    return cfg.resolved()


@cache
def alone(case: Case) -> dict:
    """Trains the case in this process, without its strategy, its deliberate mistake and its count of collectives. An
    overflow of the case occurs in the same window."""
    of_several = ("strategy", "devices")
    cfg = composed(case)
    lines = tuple(line for line in case.lines if line.split("=")[0].split(".")[0] not in of_several)
    case = replace(case, lines=lines, overflow=case.overflow and (case.overflow[0], 0, case.overflow[2]))
    if case.apart:
        ranks, batches = cfg.data_ranks, cfg.accumulation.arguments.get("batches", 1)
        apart = (*lines, "accumulation=fixed", f"accumulation.batches={ranks * batches}")
        case = replace(case, lines=apart, together=case.together // ranks, apart=False)
    return _alone(replace(case, wrong=None, counted=False))


@cache
def _alone(case: Case) -> dict:
    return trained(case)


def fitted(case: Fitted) -> dict:
    from lowmem.fit import fit

    mistake = patch("lowmem.saving.random_states.restore", lambda *_: None) if case.drawn_anew else nullcontext()
    with mistake:
        return {"val_loss": fit(run_of(case.lines), Path(case.folder), {}, case.lines)["val_loss"]}


def trained(case: Case) -> dict:
    cfg = composed(case)
    with ExitStack() as stack:
        if cfg.weights_dtype == "float64":
            stack.enter_context(patch("lowmem.techniques.loss.cross_entropy.full", fp64_loss))
        if case.wrong:
            WRONG[case.wrong](stack)
        ranks = stack.enter_context(process_group(cfg))
        return _trained(case, cfg, ranks)


def _trained(case: Case, cfg, ranks) -> dict:
    seen, module, windows = Seen(case), *built(case, cfg, ranks)
    plugins = list(map(instantiate, cfg.plugins))
    callbacks = [*build.callbacks(cfg), Verified(with_positions(cfg.data.arguments)), seen]
    callbacks += module.own_loss.callbacks()  # after `seen`, so that it also counts the collectives of these callbacks
    training = parity.trainer(cfg, plugins, callbacks, ranks.lightning())
    torch.manual_seed(1)
    training.fit(module, windows)
    return seen.answer | {"skipped": module.skipped_steps, "steps": training.global_step, "tokens": module.tokens}


def built(case: Case, cfg, ranks):
    with ranks.rank_0_first():
        data = build.data(cfg, None, ranks) if case.from_data else None
    if data:
        described = data.described
    elif case.network:
        shape = streams.MODELS[case.network] | dict.fromkeys(DROPOUTS, 0.0)
        described = loading.Described(cfg.model, AutoConfig.for_model(case.network, **shape))
    else:
        described = loading.describe(cfg)
    torch.manual_seed(0)
    module = build.causal_lm(cfg, described, ranks=ranks)
    ranks.shard(module)
    share = build.share_of(cfg, ranks)
    return module, data.train if data else WindowLoader(parity.rows_for(parity.pairs_loss(cfg)), share, cfg.windows, 0)


class Seen(Callback):
    """Records in `answer` the loss of each window, whether the optimizer stepped, and the collectives of the window if
    `case.counted`; the clipped gradients of each step, divided by the loss scale; the result of `_bytes` at the last
    step; and the final weights."""

    def __init__(self, case: Case) -> None:
        self.case, self.counts = case, Counts() if case.counted else None
        self.answer = {"gradients": [], "losses": [], "stepped": [], "collectives": []}

    def setup(self, trainer, module, stage):
        if self.case.overflow:
            _overflowing(module, *self.case.overflow)

    def on_fit_start(self, trainer, module):
        optimizer = module.optimizer
        clip = optimizer.clip

        def clipped(*how):
            clip(*how)
            scale, counted = optimizer.scale, dict(self.counts.now) if self.counts else None
            self.answer["gradients"].append(_whole(module, lambda p: _of(p.grad, p) / scale))
            if self.counts:  # drop the collectives that the line above has added
                self.counts.now = counted
            self.answer["bytes"] = _bytes(module, optimizer)

        optimizer.clip = clipped

    def on_train_batch_start(self, trainer, module, *_):
        if self.counts:
            self.counts.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, *_):
        if self.counts:
            self.counts.__exit__(None, None, None)
            self.answer["collectives"].append(dict(self.counts.now))
            self.counts.now.clear()
        self.answer["losses"].append(float(outputs["loss"]))
        self.answer["stepped"].append(bool(outputs["stepped"]))

    def on_train_end(self, trainer, module):
        self.answer["weights"] = _whole(module, lambda p: module.full_precision(p).detach())


def _of(gradient, p):
    return torch.zeros_like(p) if gradient is None else gradient


def _whole(module, of):
    """Returns a dict: name of a trained parameter -> its gathered tensor (an fp64 array), or None on ranks that do not
    receive the tensor. Args: of: function that takes a local parameter and returns the tensor to gather."""
    ranks, found = module.ranks, {}
    for name, p in module.model.named_parameters():
        if p.requires_grad:
            whole = ranks.gathered(p, of(ranks.local(p)))
            found[name] = None if whole is None else whole.detach().double().numpy().copy()
    return found


def _bytes(module, optimizer):
    """Returns the bytes of weights, gradients and optimizer state in this process, without tensors of one element."""
    local = [module.ranks.local(p) for p in module.model.parameters()]
    local = [p for p in local if not p.is_meta]
    state = (
        part
        for one in optimizer.state.values()
        for value in one.values()
        if torch.is_tensor(value)
        for part in plain_tensors(value)
    )
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)  # noqa: E731
    return {
        "weights": size(local),
        "gradients": size(p.grad for p in local if p.grad is not None),
        "state": size(state),
    }


class Counts(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self):
        super().__init__()
        self.now = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            self.now[name] = self.now.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _overflowing(module, window: int, rank: int, where: str) -> None:
    ranks = module.ranks
    computes = ranks if hasattr(ranks, "loss") else module  # a pipeline's strategy calls its own `loss`
    loss = computes.loss
    of_rank = ranks.rank == rank

    def is_there():
        return of_rank and module.position.window == window

    if where == "loss":
        computes.loss = Function(lambda *what: loss(*what) * (1e30 if is_there() else 1.0))
        return
    gather = ranks.gather_gradients

    def collected():
        gather()
        if is_there():
            first = next(p for p in module.local_parameters.parameters() if p.grad is not None)
            first.grad.view(-1)[0] = float("inf")

    ranks.gather_gradients = collected


# --- deliberate mistakes, which tests must detect --------------------------------------------------------------


def _mean_of_means(stack):
    """Each rank divides its loss by its own number of learned tokens, instead of the number on all ranks."""
    from lowmem.training.module import CausalLM

    run_window = CausalLM.run_window

    def wrong(self, window):
        own = sum(micro_batch.learned_tokens for micro_batch in window.micro_batches)
        return run_window(self, window._replace(weight=max(1, own)))

    stack.enter_context(patch.object(CausalLM, "run_window", wrong))


def _local_norm(stack):
    """Each rank clips by the norm of its own gradient shards, instead of the norm over all ranks."""
    from lowmem.step.gradients import norm_of_all
    from lowmem.techniques.strategy.several import Divided

    stack.enter_context(patch.object(Divided, "norm", lambda self, parameters: norm_of_all(parameters)))


def _without_factor(stack):
    """The loss is not multiplied by the number of ranks, so the gradients, which torch averages over the ranks, are too
    small."""
    from lowmem.techniques.strategy.ddp import DataParallel
    from lowmem.techniques.strategy.fsdp import FullyShard

    for strategy in (DataParallel, FullyShard):
        made = strategy.__init__

        def wrong(self, *args, made=made, **kwargs):
            made(self, *args, **kwargs)
            self.factor = 1.0

        stack.enter_context(patch.object(strategy, "__init__", wrong))


def _never_synced(stack):
    """DDP does not exchange gradients, not even after the last micro-batch."""
    from lowmem.techniques.strategy.ddp import DataParallel

    stack.enter_context(patch.object(DataParallel, "micro_batch_context", lambda self, last: self.forward.no_sync()))


def _silent(stack):
    """Rank 1 sleeps for twice the time limit instead of training."""
    if os.environ.get("RANK") == "1":
        stack.enter_context(patch("pair._trained", lambda *_: time.sleep(2 * LIMIT)))


def _own_z(stack: ExitStack) -> None:
    """Each rank computes z of the KTO loss from its own rows, instead of the rows of all ranks. On a rank without rows,
    z is 0."""
    from lowmem.techniques.loss.mismatched import MismatchedPass

    compute = MismatchedPass.compute

    def own(_, numbers):
        return numbers + torch.tensor([0.0, float(numbers[1] == 0)])

    def alone(self, module, groups):
        with patch.object(type(module.ranks), "all_sum", own):
            compute(self, module, groups)

    stack.enter_context(patch.object(MismatchedPass, "compute", alone))


WRONG = {
    "silent": _silent,
    "mean of means": _mean_of_means,
    "local norm": _local_norm,
    "without factor": _without_factor,
    "never synced": _never_synced,
    "own z": _own_z,
}


def apart(ranks: list[dict], one: dict) -> dict[str, float]:
    """Returns the largest relative differences between several ranks and one process. Differences of the gathered
    gradients of a step, or of the gathered weights, are divided by the largest element of all these tensors in the one
    process. Differences of losses are divided by the loss of the one process, and windows without a step are left out.

    Raises:
        AssertionError: the ranks have different weights, or the skipped steps or the tokens of a rank differ from the
            values of the one process.
    """
    ours = ranks[0]
    for name, weight in ours["weights"].items():  # all ranks that received the weight must have equal values
        for other in (rank["weights"][name] for rank in ranks):
            assert other is None or (other == weight).all(), f"{name} is another on each rank"
    assert all(rank["stepped"] == one["stepped"] for rank in ranks), [rank["stepped"] for rank in ranks]
    assert all(rank["skipped"] == one["skipped"] and rank["tokens"] == one["tokens"] for rank in ranks)
    gradients = [_furthest(a, b) for a, b in zip(ours["gradients"], one["gradients"], strict=True)]
    both = [zip(rank["losses"], one["losses"], one["stepped"], strict=True) for rank in ranks]
    losses = [abs(a - b) / abs(b) for pairs in both for a, b, stepped in pairs if stepped]
    return {"gradients": max(gradients), "weights": _furthest(ours["weights"], one["weights"]), "losses": max(losses)}


def _furthest(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys()
    largest = max(abs(one).max() for one in theirs.values())
    return float(max(abs(ours[name] - theirs[name]).max() for name in theirs) / largest)
