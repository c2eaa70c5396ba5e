"""Trains with lowmem's module and Lightning's trainer, and compares losses and updates with the results of the oracle
(`oracle.py`)."""

import inspect
import json
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from bitsandbytes import functional
from lightning.pytorch import Callback, Trainer

import oracle
import pair_oracle
from lowmem.config.declarations import SHARED, groups, techniques
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.data.loader import MicroBatch, Rows, Share, WindowLoader
from lowmem.model import loading as model
from lowmem.techniques.strategy.contract import ONE_DEVICE
from lowmem.training import build
from lowmem.training.build import causal_lm, optimizer

SEQUENCES, LENGTH, VOCABULARY = 9, 16, 300  # an epoch: a window of 8 sequences, then a window of 1
STEPS, LR, DECAY = 4, 1e-2, 2.0
# Llama has RoPE but no biases: the exact gradient of a key bias is 0, so only rounding errors would be compared.
# Tensors smaller than 64 x 64 have no 8-bit optimizer state.
MODEL = (
    "model=llama-3.2-1b",
    "model.pretrained=false",
    f"model.architecture.vocab_size={VOCABULARY}",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=128",
    "model.architecture.num_hidden_layers=3",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
    "model.architecture.head_dim=32",
    "model.architecture.bos_token_id=null",
    "model.architecture.eos_token_id=null",
)
BASE = (
    *MODEL,
    f"lr={LR}",
    f"max_steps={STEPS}",
    f"seq_len={LENGTH}",
    "batch_size=8",
    "scheduler=linear",
    "scheduler.warmup_steps=0",
    f"optim.weight_decay={DECAY}",
    "clip=0.5",
    "device=cpu",
    "logger=none",
    "loss=full",
)
CHOICES = [f"{group}={name}" for group in groups() if group != SHARED for name in techniques(group)]
BUDGET = ("compile=blocks", "compile.activation_memory_budget=0.5", "compile.backend=aot_eager_decomp_partition")
COMPILED = ("optim=adamw4bit",)  # its update is compiled, which takes seconds per shape
# Techniques that only `make test-all` tests. Each shares most of its code with a technique that `make test` tests.
SIBLINGS = (
    *(f"precision={name}" for name in ("tf32", "bf16", "16", "bf16-true", "16-true", "bf16-master")),
    *(f"optim={name}" for name in ("adamw8bit", "paged_adamw8bit", "paged_adamw32bit", "lion8bit", "muon", "sgd")),
    *(f"accumulation={name}" for name in ("effective_batch", "by_epoch", "by_step")),
    *(f"gradient_checkpointing={name}" for name in ("every_k", "sqrt", "selective", "offload_attention")),
    *(
        "loss=tiled",
        "loss=ipo",
        "loss=orpo",
        "loss=simpo",
        "loss=kto",
        "compile=blocks",
        "adapter=dora",
        "adapter=qlora",
        *COMPILED,
    ),
)
# All techniques that conf/ had when benchmarks/results/techniques.json was written: the keys of its entry "refused",
# and the defaults.
SHIPPED = (
    *json.loads((Path(__file__).parents[2] / "benchmarks/results/techniques.json").read_text())["refused"],
    *("precision=32", "optim=adamw", "accumulation=none", "gradient_checkpointing=none", "loss=full"),
    *("compile=none", "weights=resident", "adapter=none"),
)
# With this beta, the gradients of a preference loss are about as large as the gradients of a loss over tokens.
# `rows_for` makes the rows; nothing is read from data.path.
PAIRED = ["loss.beta=2", "data=preference", "data.path=x"]
# choice -> further overrides that it needs in these tests
WITH = {
    "precision=16": ["precision.init_scale=4096"],
    "precision=16-true": ["precision.init_scale=4096"],
    "precision=16-master": ["precision.init_scale=4096"],
    "accumulation=fixed": ["batch_size=2"],
    "accumulation=effective_batch": ["batch_size=2", "accumulation.size=8"],
    "accumulation=by_epoch": ["batch_size=2", "accumulation.sizes={0: 4, 1: 2}"],
    "accumulation=by_step": ["batch_size=2", "accumulation.sizes={0: 4, 2: 2}"],
    "compile=blocks": ["compile.backend=aot_eager"],
    "weights=streamed": ["precision=bf16-master", "gradient_checkpointing=every_layer"],
    "loss=chunked": ["loss.rows=7"],
    "loss=tiled": ["loss.columns=64"],
    **{f"loss={name}": ["loss.columns=64", *PAIRED] for name in pair_oracle.LOSSES},
    "optim.in_backward=true": ["clip=null"],
    # steps as large as those with AdamW; smaller steps would not change 16-bit weights
    "optim=sgd": ["lr=10", "optim.weight_decay=0.002"],
}
# accumulation -> number of sequences of each of the STEPS windows. Accumulations that are not listed have windows of 8,
# 1, 8 and 1 sequences.
WINDOWS = {"by_epoch": (8, 1, 4, 4), "by_step": (8, 1, 4, 4)}


def shipped_but(*names: str) -> tuple[str, ...]:
    """Returns SHIPPED without these names, for the mark `matrix_rows`. A technique that is added to conf/ later is not
    in SHIPPED, so `make test` runs its rows."""
    return tuple(one for one in SHIPPED if one not in names)


class Ragged(Rows):
    """SEQUENCES rows of LENGTH random tokens. Row i has labels only at the positions 2 to LENGTH - i - 1."""

    seq_len = LENGTH

    def __init__(self):
        self.tokens = np.random.default_rng(1).integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1))

    def __len__(self):
        return SEQUENCES

    def micro_batch(self, indices):
        rows = torch.from_numpy(self.tokens[indices])
        labels = rows[:, 1:].clone()
        for row, index in zip(labels, indices, strict=True):
            row[LENGTH - int(index) :] = -100
            row[:2] = -100
        return MicroBatch(rows[:, :-1], labels)


def pairs_loss(cfg):
    """Returns the name of the run's loss if the loss is a preference loss, otherwise None."""
    name = cfg.loss.target.rpartition(".")[2].lower()
    return name if name in pair_oracle.LOSSES else None


def rows_for(pairs):
    if pairs == "kto":
        return pair_oracle.RaggedAnswers(SEQUENCES, LENGTH, VOCABULARY)
    return pair_oracle.RaggedPairs(SEQUENCES, LENGTH, VOCABULARY) if pairs else Ragged()


def overrides(*techniques):
    lines = [
        *BASE,
        *(line for t in techniques for line in WITH.get(t, [])),
        *techniques,
    ]  # techniques take precedence, because they come last
    if {"optim=sgd", "optim.in_backward=true"} <= {*techniques}:  # lr=10 diverges without clipping
        lines += ["lr=0.1", "optim.weight_decay=0.2"]
    return lines


def trainer(cfg, plugins, callbacks, strategy=None):
    """Returns a Lightning trainer for the device of `cfg`."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(
        accelerator="gpu" if cfg.device == "cuda" else "cpu",
        devices=1,
        strategy=strategy or ONE_DEVICE.lightning(),
        max_steps=cfg.max_steps,
        max_epochs=-1,
        plugins=plugins,
        callbacks=callbacks,
        **dict.fromkeys(off, False),
    )


def decay_late(monkeypatch):
    """Makes bitsandbytes' kernels decay a weight after its update, as its CUDA kernels for AdamW do without this patch
    (bitsandbytes issue 2010)."""

    def late(kernel):
        names = list(inspect.signature(kernel).parameters)

        def stepped(*args, **named):
            named |= dict(zip(names, args, strict=False))
            kernel(**named | {"weight_decay": 0.0})
            named["p"].mul_(1 - named["lr"] * named["weight_decay"])

        return stepped

    for name in ("optimizer_update_32bit", "optimizer_update_8bit_blockwise"):
        monkeypatch.setattr(functional, name, late(getattr(functional, name)))


class Losses(Callback):
    """Records for every window its loss, and a dict of the weights that its forward pass read: name -> fp32 tensor on
    the CPU."""

    def __init__(self):
        self.seen, self.read = [], []

    def on_before_backward(self, trainer, module, loss):  # the forward pass has waited for all its copies of weights
        weights, stored = module.model.named_parameters(), module.weights.stored
        self.now = {name: stored(p).detach().to("cpu", torch.float32, copy=True) for name, p in weights}

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.seen.append(float(outputs["loss"]))
        self.read.append(self.now)


def run(cfg, wide=False, callbacks=()):
    """Trains a run. Returns two dicts of tensors by name: the weights before training, and the weights after training.
    Weights before training are in fp32.

    Args:
        wide: True returns the trained weights in their own dtype; False converts them to fp32.
        callbacks: callbacks in addition to those of `cfg` and of its loss.
    """
    torch.manual_seed(0)
    module = causal_lm(cfg, model.describe(cfg))
    before = {name: p.detach().float().clone() for name, p in module.model.named_parameters()}
    windows = WindowLoader(rows_for(pairs_loss(cfg)), Share(cfg.batch_size), instantiate(cfg.accumulation), seed=0)
    plugins = list(map(instantiate, cfg.plugins))
    training = trainer(cfg, plugins, [*build.callbacks(cfg), *module.own_loss.callbacks(), *callbacks])
    training.fit(module, windows)
    assert training.global_step == cfg.max_steps and module.skipped_steps == 0
    after = {name: p.detach().cpu() for name, p in module.model.named_parameters()}
    return before, after if wide else {name: p.float() for name, p in after.items()}


def expected(cfg, optim, accumulation, held_in=None):
    """Trains the oracle in fp32 on the CPU, from the run's initial weights. Returns two dicts of tensors by name: the
    weights before training, and the weights after training.

    Args:
        held_in: name of the dtype to which weights are rounded after every step; None: float32 with an adapter,
            otherwise the dtype of the run's weights.
    """
    clip = None if cfg.clip is None else float(cfg.clip)
    windows = WINDOWS.get(accumulation, (8, 1, 8, 1))
    decay, frozen, adapter = float(cfg.optim.weight_decay), tuple(cfg.freeze or ()), _adapter(cfg)
    dtypes = cfg.loaded_in, held_in or ("float32" if adapter else cfg.weights_dtype)
    return _expected(*dtypes, optim, windows, clip, float(cfg.lr), decay, frozen, adapter, pairs_loss(cfg))


@cache
def _expected(dtype, held_in, optim, windows, clip, lr, decay, frozen, adapter, pairs):
    network = _network(dtype, adapter)
    for name, p in network.named_parameters():
        p.requires_grad_(p.requires_grad and not any(fnmatchcase(name, pattern) for pattern in frozen))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    rule = oracle.RULES.get(optim, oracle.adamw)
    how = windows, SEQUENCES, rule, lr, decay, clip, getattr(torch, held_in), _mean_loss(pairs)
    return before, oracle.train(network, partial(_read, pairs), *how)


def expected_losses(accumulation, weights, adapter=None, dtype="float32", pairs=None):
    """Returns the oracle's loss of every window, in fp32 on the CPU.

    Args:
        weights: for each window, the weights before its step: name -> tensor.
        dtype: name of the dtype in which the run loaded its weights; the oracle converts them to fp32.
    """
    windows = WINDOWS.get(accumulation, (8, 1, 8, 1))
    read, loss = partial(_read, pairs), _mean_loss(pairs)
    return oracle.losses(_network(dtype, adapter), read, windows, SEQUENCES, weights, loss)


def _mean_loss(pairs):
    return partial(pair_oracle.mean_loss, pairs, beta=2.0) if pairs else None


def _adapter(cfg):
    """Returns the name of the run's adapter, or None."""
    named = {run_of([f"adapter={name}"]).adapter.target: name for name in techniques("adapter") if name != "none"}
    return named.get(cfg.adapter.target)


def _network(dtype, adapter=None):
    """Returns the oracle's model in fp32, with the initial weights of the run and of its adapter. Quantized weights are
    dequantized."""
    described = model.describe(run_of(MODEL))

    def built():
        torch.manual_seed(0)
        return model.load(described, getattr(torch, dtype))

    network = built()
    if adapter is None:
        return network.float()
    instantiate(run_of([f"adapter={adapter}"]).adapter)(network)
    start, drawn = dict(network.named_parameters()), network.peft_config["default"]
    plain = built().float()
    oracle.adapt(plain, start, drawn.lora_alpha, drawn.r)
    for name, part in plain.named_modules():
        if name.endswith(".base_layer") and f"{name}.weight" not in start:  # quantized: becomes a dequantized buffer
            del part.weight
            part.register_buffer("weight", network.get_submodule(name).weight.float())
    return plain


def trains_vectors(cfg):
    return any(p.requires_grad and p.dim() < 2 for p in _network("float32", _adapter(cfg)).parameters())


def _read(pairs, indices):
    batch = rows_for(pairs).micro_batch(np.array(indices))
    return (batch,) if pairs else (batch.input_ids, batch.labels)


def deviations(cfg, *techniques):
    """Trains a run and the oracle. Returns the run's relative deviations from the oracle: (total update of matrices,
    total update of vectors, largest deviation of a window's loss). The oracle computes each loss with the run's
    weights, because the deviations of the updates already include errors of the weights."""
    chosen = dict(technique.split("=") for technique in techniques)
    accumulation = chosen.get("accumulation", "none")
    (start, theirs), losses = expected(cfg, chosen.get("optim", "adamw"), accumulation), Losses()
    before, ours = run(cfg, callbacks=[losses])
    assert all(torch.equal(before[name], start[name]) for name in start)
    right = expected_losses(accumulation, losses.read, _adapter(cfg), cfg.loaded_in, pairs_loss(cfg))
    apart = (abs(one / other - 1) for one, other in zip(losses.seen, right, strict=True))
    return *errors(start, ours, theirs), max(apart)


def missing(technique, found):
    """Returns the error for a technique that exceeds its tolerance. The error says what to add to the tests if the
    technique is correct."""
    rule = (
        "its update rule in RULES of tests/support/oracle.py, where it is not AdamW's; "
        if "optim=" in technique
        else ""
    )
    return (
        f"{technique} is off by {found} (update of matrices, of vectors, loss). If it computes what it should, add "
        f"{rule}what it may be off by, with the reason, in UPDATE of tests/support/tolerances.py."
    )


def off_on_one_matrix(cfg, wrong=False):
    """Returns the relative deviation of an optimizer's total update from the update by the oracle's AdamW, after 20
    steps on one matrix. Args: wrong: True replaces every second gradient by zeros for the optimizer, but not for the
    oracle."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 128, bias=False).to(cfg.device)
    theirs, state = model.weight.detach().cpu().clone(), {}
    start, made = theirs.clone(), optimizer(cfg)(model)
    direction = torch.randn(128, 64)
    for step in range(1, 21):
        g = direction + torch.randn(128, 64)
        model.weight.grad = ((g * (step % 2)) if wrong else g).to(cfg.device)
        made.step()
        theirs = oracle.adamw(theirs, g, state, step, 1e-2, 0.1, "matrix")
    return ((model.weight.detach().cpu() - theirs).norm() / (theirs - start).norm()).item()


def errors(start, ours, theirs):
    """Returns (error of matrices, error of vectors). An error is the norm of the deviation of the run's total update
    from the oracle's update, over all tensors of the kind, divided by the norm of the oracle's update. If the oracle
    changes no tensor of the kind, the error is 0.0 if the run changes none either, otherwise 1.0."""

    def relative(names):
        wrong = torch.cat([(ours[n] - theirs[n]).flatten() for n in names]).norm()
        right = torch.cat([(theirs[n] - start[n]).flatten() for n in names]).norm()
        return (wrong / right).item() if right else float(wrong > 0)  # right is 0 if all these parameters are frozen

    matrices = [name for name in theirs if theirs[name].dim() >= 2]
    return relative(matrices), relative([name for name in theirs if name not in matrices])
