"""Tests that weights above the largest number of a dtype are refused with the name of the tensor, before training and
before a file is written."""

import logging

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file

from lowmem.model.magnitude import Rounding, check_holds
from lowmem.saving.export import ModelFolder, Weights, export
from lowmem.saving.export_adapter import export as export_adapter
from lowmem.system.errors import Refused
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.training.build import _check
from networks import Nothing, network

NORM = "model.norm.weight"


def large(number=1e5, name=NORM):
    made = network("llama")
    with torch.no_grad():
        made.get_parameter(name)[..., 3] = number
    return made


def adapted(made):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), made)
    return made


class Divided(OneDevice):
    """A sharding strategy in which this process has all shards."""

    divides = True


def whole(made, folder):
    export(made, folder)


def adapter(made, folder):
    export_adapter(adapted(made), folder, False, "somebody/base")


def merge(made, folder):
    export_adapter(adapted(made), folder, True, None)


def divided_merge(made, folder):
    made = adapted(made)
    export_adapter(made, folder, True, None, Weights(made, ranks=Divided()))


@pytest.mark.parametrize("write", [whole, merge, divided_merge])
@pytest.mark.parametrize("name", [NORM, "model.layers.1.self_attn.q_proj.weight"])
def test_export_that_would_round_a_weight_to_inf_is_refused(tmp_path, write, name):
    with pytest.raises(
        OverflowError, match=rf"^{name} contains 100000, more than the largest float16 number, 65504\.$"
    ):
        write(large(name=name), ModelFolder(tmp_path / "model", Nothing(), "float16"))
    assert not list(tmp_path.iterdir())


def test_adapter_export_that_would_round_a_weight_to_inf_is_refused(tmp_path):
    made = adapted(network("llama"))
    with torch.no_grad():
        made.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight")[0, 0] = -7e4
    with pytest.raises(OverflowError, match=r"lora_A\.weight contains 70000, more than the largest float16 number"):
        export_adapter(made, ModelFolder(tmp_path / "model", Nothing(), "float16"), False, "somebody/base")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [whole, adapter, merge, divided_merge])
@pytest.mark.parametrize(("dtype", "number"), [("float16", 65504.0), ("bfloat16", 1e5), (None, 1e30)])
def test_weights_within_the_range_of_the_export_dtype_are_written(tmp_path, write, dtype, number):
    write(large(number), ModelFolder(tmp_path / "model", Nothing(), dtype))
    (file,) = (tmp_path / "model").glob("*.safetensors")
    assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_inf_and_nan_already_in_the_weights_pass_the_export_check():
    numbers = torch.tensor([float("inf"), float("nan"), 1.0])
    for each in (numbers[:1], numbers[1:2], numbers):
        assert Rounding(torch.float16)("x", each).dtype == torch.float16


@pytest.mark.parametrize(("small", "told"), [(2, False), (200, True)])
def test_exported_weights_rounded_to_zero_are_counted_and_reported_if_many(caplog, small, told):
    numbers = torch.ones(10_000)
    numbers[:small] = 1e-8
    numbers[-1000:] = 0.0  # zero before rounding, so not counted
    rounding = Rounding(torch.float16)
    rounding("x", numbers)
    assert (rounding.zeros, rounding.all) == (small, 9_000)
    with caplog.at_level(logging.WARNING, "lowmem"):
        rounding.tell()
    assert ("200 of 9,000 nonzero exported numbers became 0" in caplog.text) == told


def test_export_to_a_wider_dtype_skips_the_overflow_check(monkeypatch):
    monkeypatch.setattr("lowmem.model.magnitude._largest", lambda _: pytest.fail("looked"))
    assert Rounding(torch.float32)("x", torch.ones(3, dtype=torch.float16)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_out_of_fp16_range_are_refused_for_fp16_precisions(config, dtype):
    for precision in ("16", "16-true", "16-master"):
        with pytest.raises(
            Refused, match=rf"^{NORM} contains (100000|99840), more than .* 65504\. Type precision=bf16"
        ):
            _check(config(f"precision={precision}"), large().to(dtype))
    for precision in ("32", "bf16-true", "bf16-master"):
        _check(config(f"precision={precision}"), large().to(dtype))


def test_weights_that_became_inf_on_loading_are_refused_by_name():
    with pytest.raises(
        Refused, match=rf"^{NORM} contains a number above the largest float16 number, 65504\. Do that\.$"
    ):
        check_holds(large().to(torch.float16), torch.float16, "Do that.")


def test_weights_out_of_range_of_export_dtype_are_refused_before_training(config):
    lines = ("precision=32", "export_dtype=float16")
    with pytest.raises(Refused, match=f"{NORM} contains 100000.* Type export_dtype=bfloat16"):
        _check(config(*lines), large())
    with pytest.raises(Refused, match=f"{NORM} contains 100000"):
        _check(config(*lines, "adapter=lora", "merge=true"), large())
    _check(config(*lines, "adapter=lora"), large())  # only the adapter is exported
