"""Tests that a frozen weight has no gradient, optimizer state, master or weight decay and is in no checkpoint, and that
a resumed run equals an unbroken run bit for bit."""

import logging

import pytest
import torch
from lightning.pytorch import Callback

import parity
from lowmem.config.check import settled
from lowmem.config.typed_lines import composed
from lowmem.memory import ledger
from lowmem.offload.host_weight import HostWeight
from lowmem.offload.master_weights import MasterWeights
from lowmem.saving.checkpoint import Saved, complete
from lowmem.step.gradients import norm_of_all
from lowmem.system.errors import Refused
from lowmem.techniques.precision.weights_16bit import SixteenBitWeights
from same import last, same
from tolerances import allowed, within

pytestmark = pytest.mark.kernels
FROZEN = ["model.layers.0.*", "model.embed_tokens.*", "*layernorm*"]  # of the parity tests' Llama, whose head is tied
FREEZE = f"freeze=[{','.join(FROZEN)}]"
PRECISIONS = ["precision=32", "precision=bf16-sr", "precision=bf16-master", "precision=16-true"]


def config_of(config, *lines):
    return config(*parity.overrides(*lines), base=())


class Held(Callback):
    """Before the optimizer step, counts the bytes of gradients. After the step, counts the bytes of optimizer state, of
    weights, and of masters and gradients in host memory."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer, module, *_):
        self.state = sum(t.nbytes for t in ledger.optimizer_state(trainer.optimizers[0]) if t.dim())
        self.weights = sum({id(p): p.nbytes for p in module.parameters()}.values())
        on_host = (*module.optimizer.masters_on_host(), *module.optimizer.gradients_on_host())
        self.masters = sum(t.nbytes for t in on_host)


def counted(frozen=FROZEN):
    """Returns (number of trained elements, number of all elements)."""
    from fnmatch import fnmatchcase

    every = {name: p.numel() for name, p in parity._network("float32").named_parameters()}
    left = {name: n for name, n in every.items() if not any(fnmatchcase(name, pattern) for pattern in frozen)}
    return sum(left.values()), sum(every.values())


def host_state(config, *lines):
    look = Held()
    parity.run(config_of(config, *lines, FREEZE), callbacks=[look])
    return look


def right(look, precision):
    own, every = counted()
    wide = precision == "precision=32"
    gradients = {"precision=32": 4 * own, "precision=bf16-master": 0}.get(precision, 2 * own)
    masters = own * (4 + 2) if precision == "precision=bf16-master" else 0  # fp32 masters and 16-bit gradients
    found = (look.weights, look.gradients, look.state, look.masters)
    return found == ((4 if wide else 2) * every, gradients, 8 * own, masters)


@pytest.mark.parametrize("precision", PRECISIONS[:3])
def test_gradients_optimizer_state_and_masters_exist_for_trained_weights_only(config, precision):
    assert right(host_state(config, precision), precision)


@pytest.mark.wrong
def test_wrong_variant_with_masters_of_frozen_weights_fails_the_byte_count(config, monkeypatch):
    """The deliberately wrong variant also makes masters of frozen weights, so host memory holds more bytes."""

    def make(self, module):
        for name, p in module.named_parameters():
            self.masters[p] = HostWeight(name, p, self.precision.dtype)

    monkeypatch.setattr(MasterWeights, "make", make)
    assert not right(host_state(config, "precision=bf16-master"), "precision=bf16-master")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "more", [[], ["gradient_checkpointing=every_layer", "loss=chunked"]], ids=["full loss", "every_layer and chunked"]
)
def test_frozen_weights_are_unchanged_and_trained_weights_equal_a_reference_training(config, precision, more):
    cfg = config_of(config, precision, *more, FREEZE)
    (start, theirs) = parity.expected(cfg, "adamw", "none")
    before, ours = parity.run(cfg)
    frozen = [name for name in start if torch.equal(theirs[name], start[name])]
    assert sum(start[name].numel() for name in start if name not in frozen) == counted()[0]
    for name in frozen:  # rounded at most once
        rounded = before[name].bfloat16().float() if precision == "precision=bf16-master" else before[name]
        assert torch.equal(ours[name], rounded), name
    assert within(parity.errors(start, ours, theirs), allowed(precision, *more)[:2])


def test_wrong_variant_that_trains_frozen_weights_differs_from_a_reference_training(config):
    cfg = config_of(config, FREEZE)
    start, theirs = parity.expected(cfg, "adamw", "none")
    _, ours = parity.run(config_of(config, "freeze=[model.layers.0.*]"))
    assert not within(parity.errors(start, ours, theirs), allowed("precision=32")[:2])


def test_fp32_weight_among_16_bit_weights_is_not_rounded(config):
    """The update from gradients scaled by 4 equals the update of plain AdamW bit for bit."""
    weight, gradient = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)
    exact = torch.nn.Parameter(weight.detach().clone())
    for p, g in ((weight, gradient * 4), (exact, gradient)):
        optimizer = torch.optim.AdamW([p], lr=1e-3)
        p.grad = g.clone()
        if p is weight:
            optimizer = SixteenBitWeights().optimizer(optimizer, torch.nn.Module(), norm_of_all)
            optimizer.scale = 4.0
        optimizer.step()
    assert torch.equal(weight, exact) and not torch.equal(weight, weight.bfloat16().float())


# --- checkpoints ------------------------------------------------------------------------------------------------------

HALF = ("freeze=[*.h.0.*,*.wpe.*]", "save_every=1", "lr=1e-2", "model.architecture.resid_pdrop=0.1")


@pytest.fixture
def pretrained(fit):
    """Returns overrides of a run that starts from a folder of weights."""
    _, folder = fit("max_steps=1", folder="published")
    lines = ("model=hf", f"model.name={folder / 'model'}", "model.lr=1e-2", "model.seq_len=16", "model.max_steps=4")
    return [*lines, "model.architecture={resid_pdrop:0.1}"]


def resumed(fit, *lines):
    """Returns the last checkpoint of an unbroken run, the last checkpoint of a run resumed after 2 steps, and the
    folder of the run that was stopped after 2 steps."""
    lines = [*HALF[:3], *(lines if any("hf" in line for line in lines) else (*lines, HALF[3]))]
    _, whole = fit(*lines, folder="whole")
    _, part = fit(*lines, "max_steps=2", "scheduler.total_steps=4", folder="part")
    _, again = fit(*lines, f"resume={part}", folder="again")
    return last(whole), last(again), part


SLOW = [pytest.param(f"precision={name}", marks=pytest.mark.matrix) for name in ("32", "bf16-sr")]


@pytest.mark.parametrize("precision", ["precision=bf16-master", *SLOW])
def test_resume_from_a_checkpoint_without_frozen_weights_equals_the_unbroken_run(fit, precision):
    whole, again, _ = resumed(fit, precision)
    assert all(same(whole[key], again[key]) for key in whole)
    names = whole["state_dict"].keys()
    assert names and not any(".h.0." in name or ".wpe." in name for name in names)
    assert any("lm_head" in name for name in names)  # the name of the tied head is included


def test_resume_with_frozen_pretrained_weights_equals_the_unbroken_run(fit, pretrained):
    whole, again, part = resumed(fit, *pretrained)
    assert all(same(whole[key], again[key]) for key in whole)
    assert complete(part / "checkpoints")[-1].stat().st_size < 0.7 * sum(
        file.stat().st_size * 3 for file in (part / "model").glob("*.safetensors")
    )


def test_resume_of_trained_weights_with_other_frozen_weights_is_refused(fit):
    """With seed=1 the frozen weights differ, but their names and shapes do not, so without the check the run would
    silently continue."""
    _, part = fit(*HALF, "max_steps=2", folder="part")
    with pytest.raises(Refused, match=r"holds only the trained weights, and the frozen weights .*seed="):
        fit(*HALF, f"resume={part}", "seed=1", folder="again")
    with pytest.raises(Refused, match=r"the trained weights of this run.*freeze="):
        fit(f"resume={part}", folder="full")


def test_resume_of_a_complete_checkpoint_with_freeze_or_another_width_is_refused(fit):
    _, part = fit("max_steps=2", "save_every=1", folder="part")
    with pytest.raises(Refused, match=r"missing in the trained weights of this run"):
        fit(*HALF, f"resume={part}", folder="again")
    with pytest.raises(Refused, match=r"in this model. Type the model= and model.architecture of that run"):
        fit("model.architecture.n_embd=64", f"resume={part}", folder="other")
    assert Saved(complete(part / "checkpoints")[-1]).base is None


@pytest.mark.parametrize("precision", ["precision=bf16-master", *SLOW[:1]])
def test_checkpoint_of_trained_weights_is_evaluated_and_exported_as_the_whole_model(fit, precision):
    from transformers import AutoModelForCausalLM

    summary, part = fit(*HALF, precision, folder="part")
    again, _ = fit(*HALF, precision, f"evaluate={part}", folder="evaluated")
    _, exported = fit(*HALF, precision, f"export={part}", folder="exported")
    assert again["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-3 if "bf16" in precision else 1e-6)
    one, other = (AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32) for run in (part, exported))
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=2**-8), name
    assert summary["trained_parameters"] < summary["parameters"]


# --- patterns ---------------------------------------------------------------------------------------------------------


def test_freeze_patterns_that_match_nothing_or_everything_are_refused(fit):
    with pytest.raises(Refused, match=r"no parameter name of GPT2LMHeadModel matches \*\.embed\..*transformer\.wte"):
        fit("freeze=[*.embed.*]")
    with pytest.raises(Refused, match=r"freeze=\['\*'\]: .*nothing is left to train"):
        fit("freeze=['*']")


def test_freeze_pattern_that_is_not_a_list_is_refused(config):
    with pytest.raises(Refused, match=r"freeze=x.*give a list of patterns"):
        settled(composed(["freeze=x"]))


def test_freezing_a_tied_head_freezes_the_embedding(fit, caplog):
    with caplog.at_level(logging.INFO):
        summary, _ = fit("freeze=[lm_head.*]", "max_steps=1")
    embedding = 300 * 32
    assert summary["parameters"] - summary["trained_parameters"] == embedding
    assert f"freeze: {summary['trained_parameters']:,} of" in caplog.text
