"""Tests the optimizers that lowmem builds: step sizes, weight decay, bytes of state, and restored state."""

import pytest
import torch
from torch import nn

import host_masters
import parity
from lowmem.config.declarations import techniques
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import MicroBatch
from lowmem.memory.ledger import optimizer_state, plain_tensors
from lowmem.step.gradients import norm_of_all
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.optim.build import parameter_groups
from lowmem.training.build import optimizer
from networks import network
from parity import COMPILED as COMPILED_CHOICES

pytestmark = pytest.mark.kernels
OPTIMIZERS = list(techniques("optim"))
COMPILED = [choice.removeprefix("optim=") for choice in COMPILED_CHOICES]
EACH = [pytest.param(o, marks=pytest.mark.matrix) if o in COMPILED else o for o in OPTIMIZERS]


def stepped(config, optim, shape=(1024, 1024), *overrides, steps=1):
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0], bias=False)
    made = optimizer(config(f"optim={optim}", "lr=1e-3", *overrides))(model)
    before = model.weight.detach().clone()
    for _ in range(steps):
        model.weight.grad = torch.randn(shape) * 1e-3
        made.step()
    return model.weight.detach() - before, made


def rms(change):
    return change.square().mean().sqrt().item()


@pytest.mark.parametrize("optim", [o for o in EACH if o != "sgd"])
def test_first_step_of_every_optimizer_but_sgd_has_the_rms_of_adamw_within_20_percent(config, optim):
    """AdamW's first step moves each weight by about `lr`."""
    shape = (128, 256) if optim in COMPILED else (256, 1024)
    change, _ = stepped(config, optim, shape, "optim.weight_decay=0")
    adamw, _ = stepped(config, "adamw", shape, "optim.weight_decay=0")
    assert rms(change) == pytest.approx(rms(adamw), rel=0.2)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_typed_weight_decay_replaces_the_restored_decay_but_lr_is_restored(config, optim):
    """torch and bitsandbytes restore all settings of parameter groups. `lr` must be restored, because a schedule
    changes it during a run."""
    model = network()
    saved = optimizer(config(f"optim={optim}", "lr=1e-3", "optim.weight_decay=0.1"))(model)
    made = optimizer(config(f"optim={optim}", "lr=1e-2", "optim.weight_decay=0.37"))(model)
    made.load_state_dict(saved.state_dict())
    assert {group["role"]: group["weight_decay"] for group in made.param_groups} == {
        "matrix": 0.37,
        "embedding": 0.37,
        "vector": 0.0,
    }
    assert [float(group["lr"]) for group in made.param_groups] == pytest.approx(3 * [1e-3])


@pytest.mark.parametrize("shape", [(64, 64), (192, 768), (768, 768), (3072, 768)])
def test_first_muon_step_of_a_matrix_has_an_rms_of_0_85_to_0_97_lr(config, shape):
    change, _ = stepped(config, "muon", shape, "optim.weight_decay=0")
    assert 0.85e-3 < rms(change) < 0.97e-3


@pytest.mark.parametrize("directions", [16, 64, 256])
def test_muon_step_size_grows_with_the_square_root_of_the_gradient_rank(config, directions):
    model = nn.Linear(256, 256, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.randn(256, directions) @ torch.randn(directions, 256)
    optimizer(config("optim=muon", "lr=1e-3", "optim.weight_decay=0"))(model).step()
    assert rms(model.weight.detach() - before) == pytest.approx(0.9e-3 * (directions / 256) ** 0.5, rel=0.2)


def test_first_muon_step_of_the_default_model_has_an_rms_of_0_75_to_0_91_lr(config):
    """Gradients of a model have strong and weak directions, so the RMS is smaller than for random gradients."""
    model = network(n_embd=192, n_layer=4, n_head=4, n_positions=128, vocab_size=4096)
    groups = {group["role"]: group["params"] for group in parameter_groups(model)}
    before = [p.detach().clone() for p in groups["matrix"]]
    ids = (4096 * torch.rand(8, 129) ** 6).long()  # some tokens are frequent
    losses.full(model, MicroBatch(ids[:, :-1], ids[:, 1:])).backward()
    optimizer(config("optim=muon", "lr=1e-3", "optim.weight_decay=0"))(model).step()
    changes = [(p.detach() - b).flatten() for p, b in zip(groups["matrix"], before, strict=True)]
    assert all(0.3e-3 < rms(change) < 0.97e-3 for change in changes)
    assert 0.75e-3 < rms(torch.cat(changes)) < 0.91e-3


@pytest.mark.wrong
def test_muon_with_the_rms_rule_of_torch_takes_steps_smaller_than_lr(config, monkeypatch):
    """In the deliberately wrong variant, steps have an RMS of 0.2 lr, which matches AdamW's later steps but not
    `lr`."""
    from lowmem.techniques.optim import muon

    monkeypatch.setattr(muon, "TORCHS_RMS", 1.0)
    change, _ = stepped(config, "muon", (256, 1024), "optim.weight_decay=0")
    assert rms(change) < 0.8e-3


class FusedExperts(nn.Module):
    """Fused experts as transformers stores them, their biases, and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 24, 16))
        self.conv1d = nn.Conv1d(16, 16, 4, groups=16, bias=False)
        self.experts_bias = nn.Parameter(torch.randn(3, 24))


def test_muon_on_fused_experts_equals_muon_on_each_expert(config):
    torch.manual_seed(0)
    fused = FusedExperts()
    each = nn.ModuleList(nn.Linear(16, 24, bias=False) for _ in range(3))
    for expert, one in zip(each, fused.experts.detach(), strict=True):
        expert.weight.data.copy_(one)
    ours, theirs = (optimizer(config("optim=muon", "lr=1e-2"))(model) for model in (fused, each))
    for _ in range(3):
        fused.experts.grad = torch.randn(3, 24, 16) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
        for expert, gradient in zip(each, fused.experts.grad, strict=True):
            expert.weight.grad = gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(fused.experts, torch.stack([expert.weight for expert in each]))
    assert ours.state[fused.experts].keys() == {"momentum_buffer"}


def test_muon_updates_convolutions_and_expert_biases_with_adamw(config):
    model = FusedExperts()
    ours = optimizer(config("optim=muon"))(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    ours.step()
    assert {"exp_avg", "exp_avg_sq"} <= ours.state[model.conv1d.weight].keys() & ours.state[model.experts_bias].keys()
    assert [group["role"] for group in parameter_groups(model)] == ["matrix", "vector"]


# Bytes of state per parameter. Optimizers that are not listed here, except adafactor, may have at most the share of
# AdamW's 8 bytes that their yaml declares.
STATE_BYTES = {
    "adamw": 8.0,
    "paged_adamw32bit": 8.0,
    "adam8bit": 2.03,
    "adamw8bit": 2.03,
    "paged_adamw8bit": 2.03,
    "adamw4bit": 1.06,
    "lion8bit": 1.02,
    "muon": 4.0,
    "sgd": 0.0,
}


@pytest.mark.parametrize("optim", EACH)
def test_optimizer_state_takes_the_bytes_per_parameter_of_the_moments_that_each_optimizer_stores(config, optim):
    """For example, adamw8bit stores two moments of 1 byte per element and two fp32 scales per 256 elements."""
    change, made = stepped(config, optim)
    # keyed by storage, because all parameters share bitsandbytes' tables of 256 values
    held = {p.untyped_storage()._cdata: p.nbytes for state in optimizer_state(made) for p in plain_tensors(state)}
    per_parameter = sum(held.values()) / change.numel()
    if optim == "adafactor":
        assert per_parameter < 0.05
    elif optim in STATE_BYTES:
        assert per_parameter == pytest.approx(STATE_BYTES[optim], abs=0.006)
    else:
        assert per_parameter <= 8 * techniques("optim")[optim].saves["optimizer"], (
            f"conf/optim/{optim}.yaml declares less than the {per_parameter:.2f} bytes of state per parameter there are"
        )


@pytest.mark.parametrize("optim", [o for o in EACH if o not in ("adam8bit",)])
def test_weight_decay_is_decoupled_and_shrinks_a_matrix_by_lr_times_decay(config, optim):
    """With a gradient of zeros, only the decay moves a matrix. The decay does not enter the moments."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    made = optimizer(config(f"optim={optim}", "lr=1e-2", "optim.weight_decay=0.5"))(model)
    model.weight.grad = torch.zeros(64, 64)
    made.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.005), rtol=1e-6, atol=0)


@pytest.mark.wrong
def test_adam_with_l2_weight_decay_moves_every_weight_by_about_lr(config):
    """In the deliberately wrong variant, the decay enters Adam's moments, so each weight moves by a full step."""
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    made = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.5)
    model.weight.grad = torch.zeros(64, 64)
    made.step()
    assert ((model.weight - before).abs() > 0.009).all()


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_adam8bit_has_no_default_decay_and_its_typed_decay_is_decoupled(config, decay):
    """bitsandbytes 0.50 applies Adam8bit's decay to the weight, not to the gradient."""
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    made = optimizer(config("optim=adam8bit", "lr=1e-2", *([f"optim.weight_decay={decay}"] if decay else [])))(model)
    model.weight.grad = torch.zeros(64, 64)
    made.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 1e-2 * decay), rtol=1e-6, atol=0)


OF_BITSANDBYTES = ("adam8bit", "paged_adamw8bit", "paged_adamw32bit", "lion8bit")


@pytest.mark.parametrize("precision", ["32", "bf16-master", "bf16-true"])
@pytest.mark.parametrize("optim", OF_BITSANDBYTES)
def test_bitsandbytes_kernels_that_decay_after_the_update_give_the_bits_of_kernels_that_decay_before_the_update(
    config, monkeypatch, without_compiler, optim, precision
):
    """precision=32 updates all weights at once, bf16-master updates masters one by one, and bf16-true updates widened
    16-bit weights one by one."""

    def trained():
        torch.manual_seed(0)
        cfg = config(f"optim={optim}", f"precision={precision}", "lr=1e-2", "optim.weight_decay=2")
        model, plugin = nn.Linear(64, 128, bias=False), instantiate(cfg.precision, device="cpu")
        if cfg.masters:
            made = host_masters.made(model, plugin).optimizer(optimizer(cfg), model)
        else:
            made = plugin.optimizer(optimizer(cfg)(model), model, norm_of_all)
        for _ in range(3):
            model.weight.grad = torch.randn(128, 64, dtype=model.weight.dtype)
            if cfg.masters:
                made.collect(model.weight)
            made.step()
        return model.weight.detach().clone(), made

    before, _ = trained()
    parity.decay_late(monkeypatch)
    after, made = trained()
    assert torch.equal(before, after)
    assert [group["weight_decay"] for group in made.param_groups] == [2.0]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_every_parameter_is_in_one_group_by_role_and_vectors_do_not_decay(model_type):
    model = network(model_type, tie_word_embeddings=model_type == "gpt2")
    groups = {group["role"]: group for group in parameter_groups(model)}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))
    by_token = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    assert by_token <= {id(p) for p in groups["embedding"]["params"]}
    assert all(p.dim() == 2 and id(p) not in by_token for p in groups["matrix"]["params"])
    assert all(p.dim() == 1 for p in groups["vector"]["params"]) and groups["vector"]["weight_decay"] == 0.0
    assert "weight_decay" not in groups["matrix"] | groups["embedding"]


@pytest.mark.parametrize("optim", ["adam8bit", "adamw8bit", "paged_adamw8bit", "lion8bit"])
@pytest.mark.parametrize("bits", [8, 32])
def test_embedding_state_has_8_or_32_bits_as_embedding_bits_sets(config, optim, bits):
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False))
    made = optimizer(config(f"optim={optim}", f"optim.embedding_bits={bits}"))(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    made.step()
    first = "m" if optim == "adamw8bit" else "state1"
    embedding, matrix = (made.state[p][first].dtype.itemsize for p in model.parameters())
    assert matrix == 1 and embedding == bits // 8
    if optim != "adamw8bit":  # bitsandbytes keeps such settings in a process-wide table, which outlives the job
        assert not made.mng.pid2config and not made.mng.module_weight_config_triple


# optimizers that have no state, or whose own load method keeps fp32 state
UNCAST = {"sgd", "adam8bit", "lion8bit", "paged_adamw32bit", "paged_adamw8bit"}


@pytest.mark.parametrize("optim", [o for o in OPTIMIZERS if o not in COMPILED])
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_fp32_state_of_16_bit_weights_is_restored_in_fp32_unless_torch_casts_restored_state(
    config, optim, guarded, monkeypatch
):
    """In the deliberately wrong variant (`guarded` is False), torch casts restored state to the dtype of the weights.
    bitsandbytes does not cast state."""
    from lowmem.techniques.optim import build
    from lowmem.techniques.precision.weights_16bit import BFloat16Weights

    if not guarded:
        monkeypatch.setattr(build, "_restore_in_saved_dtypes", lambda optimizer, restored: None)
    model = nn.Linear(64, 128).bfloat16()
    made, other = (optimizer(config(f"optim={optim}"))(model) for _ in range(2))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    made = BFloat16Weights().optimizer(made, model, norm_of_all)
    made.step()
    other.load_state_dict(made.state_dict())
    same = [
        one.dtype == two.dtype and torch.equal(one, two)
        for one, two in zip(optimizer_state(made), optimizer_state(other), strict=True)
    ]
    assert all(same) == (guarded or optim in UNCAST), f"{optim}: if its state needs no guard, it belongs into UNCAST"


@pytest.mark.parametrize("optim", [o for o in OPTIMIZERS if o not in {"sgd", *COMPILED}])
def test_every_optimizer_reports_each_parameter_whose_state_is_restored(config, optim):
    """State that belongs on a drive is written to the drive when `restored` is called with its parameter."""
    model, told = network(), []
    made = optimizer(config(f"optim={optim}"))(model, restored=lambda inner, p: told.append((p, len(inner.state[p]))))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    made.step()
    made.load_state_dict(made.state_dict())
    assert {p for p, _ in told} == {*model.parameters()} and len(told) == len({*model.parameters()})
    assert all(size > 0 for _, size in told)


def test_restored_state_of_a_tensor_subclass_copies_its_inner_tensors(group_of_one):
    """`Tensor.to` on the same device does not copy a DTensor or torchao's 4-bit state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torchao.optim.subclass_4bit import OptimState4bit

    from lowmem.techniques.optim.build import _copied

    shard = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)))
    for saved in (shard, OptimState4bit.zeros((64, 64))):
        copied = _copied(saved, torch.device("cpu"))
        assert type(copied) is type(saved) and copied.shape == saved.shape
        for one, two in zip(plain_tensors(copied), plain_tensors(saved), strict=True):
            assert torch.equal(one, two) and one.data_ptr() != two.data_ptr()


@pytest.fixture
def managed(monkeypatch):
    """Replaces CUDA's managed memory by host tensors that are marked as paged. Returns the list of these tensors."""
    from bitsandbytes import functional
    from bitsandbytes.optim.optimizer import Optimizer8bit

    asked = []

    def get_paged(self, p, dtype=torch.float32):
        asked.append(torch.zeros(p.shape, dtype=dtype))
        asked[-1].is_paged = True
        return asked[-1]

    monkeypatch.setattr(Optimizer8bit, "get_state_buffer", get_paged)
    monkeypatch.setattr(functional, "prefetch_tensor", lambda tensor, to_cpu=False: None)
    return asked


def saved_and_read(made, tmp_path):
    torch.save(made.state_dict(), tmp_path / "state")
    return torch.load(tmp_path / "state", weights_only=True, mmap=True)


def buffers(made):
    return [state[key] for state in made.state.values() for key in ("state1", "state2")]


PAGED = [optim for optim in OPTIMIZERS if optim.startswith("paged")]


@pytest.mark.parametrize("optim", PAGED)
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_paged_state_is_restored_as_paged_memory_unless_bitsandbytes_restores_the_state(
    config, managed, monkeypatch, tmp_path, optim, guarded
):
    """In the deliberately wrong variant (`guarded` is False), bitsandbytes restores the state to ordinary device
    memory."""
    from lowmem.techniques.optim import build

    if not guarded:
        monkeypatch.setattr(build, "_restore_paged", lambda optimizer, theirs, saved: theirs(saved))
    model = nn.Linear(64, 128, bias=False)
    made, other = (optimizer(config(f"optim={optim}"))(model) for _ in range(2))
    model.weight.grad = torch.randn(128, 64)
    made.step()
    managed.clear()
    other.load_state_dict(saved_and_read(made, tmp_path))
    assert all(map(torch.equal, buffers(made), buffers(other)))
    assert all(any(buffer is one for one in managed) for buffer in buffers(other)) == guarded
    assert len(managed) == (2 if guarded else 0)
    before = model.weight.detach().clone()
    changes = []
    for stepping in (made, other):
        model.weight.data.copy_(before)
        stepping.step()
        changes.append(model.weight.detach().clone())
    assert torch.equal(*changes) and not torch.equal(changes[0], before)


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_paged_state_of_a_card_steps_on_a_cpu_without_cuda_prefetch_unless_bitsandbytes_restores_the_state(
    config, managed, monkeypatch, tmp_path, guarded
):
    """The checkpoint records that its state was paged. In the deliberately wrong variant (`guarded` is False), the
    first step therefore asks CUDA to prefetch the state."""
    from bitsandbytes import functional

    from lowmem.techniques.optim import build

    if not guarded:
        monkeypatch.setattr(build, "_restore_paged", lambda optimizer, theirs, saved: theirs(saved))
    model = nn.Linear(64, 128, bias=False)
    model.weight.grad = torch.randn(128, 64)
    made = optimizer(config("optim=paged_adamw8bit"))(model)
    made.step()
    saved = saved_and_read(made, tmp_path)
    monkeypatch.undo()
    if not guarded:
        monkeypatch.setattr(build, "_restore_paged", lambda optimizer, theirs, saved: theirs(saved))
    asked = []
    monkeypatch.setattr(functional, "prefetch_tensor", lambda tensor, to_cpu=False: asked.append(tensor))
    other = optimizer(config("optim=paged_adamw8bit"))(model)
    other.load_state_dict(saved)
    other.step()
    assert (not asked) == guarded
