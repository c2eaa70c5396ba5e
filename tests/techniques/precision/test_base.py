"""Tests the contract of precisions: their base class defines all attributes that other code reads, and each of its
methods except `__init__` has a docstring."""

import ast
import inspect

import pytest
import torch

from conftest import ROOT
from lowmem.techniques.precision import fp32_weights, masters, weights_16bit
from lowmem.techniques.precision.contract import BasePrecision
from lowmem.techniques.precision.loss_scale import ScaledLoss

SOURCE = ROOT / "src" / "lowmem"
EVERY = [
    value
    for module in (fp32_weights, weights_16bit, masters)
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, BasePrecision) and value.__module__ == module.__name__
]


def asked(text):
    """Returns the attributes of `plugin`, `precision` and `<...>.precision_plugin` that a source file reads."""

    def is_precision(node):
        return getattr(node, "attr", "") == "precision_plugin" or getattr(node, "id", "") in ("plugin", "precision")

    nodes = ast.walk(ast.parse(text))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_precision(node.value)}


def unknown(texts):
    return {name for text in texts for name in asked(text) if name not in vars(BasePrecision)}


def test_every_attribute_that_lowmem_reads_of_a_precision_is_defined_on_its_base_class():
    texts = [file.read_text() for file in SOURCE.rglob("*.py") if file.parent.name != "precision"]
    assert len(set().union(*map(asked, texts))) > 8
    assert unknown(texts) == set()
    assert unknown(["trainer.precision_plugin.rewound()", "plugin.dtype"]) == {"rewound", "dtype"}


def test_every_precision_hook_has_a_docstring():
    hooks = {name: hook for name, hook in vars(BasePrecision).items() if inspect.isfunction(hook)}
    assert {name for name, hook in hooks.items() if not hook.__doc__} == {"__init__"}


@pytest.mark.parametrize("precision", EVERY)
def test_each_precision_class_has_one_dtype_and_only_fp16_scales_the_loss(precision):
    """No fp16 precision inherits from a bf16 precision, and no bf16 precision from an fp16 precision."""
    dtypes = {vars(base)["dtype"] for base in precision.__mro__ if "dtype" in vars(base)}
    assert len(dtypes) <= 1
    assert issubclass(precision, ScaledLoss) == (dtypes == {torch.float16}) == precision.scales_loss
