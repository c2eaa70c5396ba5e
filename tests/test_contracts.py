"""Tests that what a class offers stands in its base class, with a default: nobody asks whether it is there."""

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowmem.data.mix import Mix
from lowmem.system.errors import Refused
from lowmem.techniques.loss.cross_entropy import Chunked, Loss, as_loss, full
from lowmem.training import build
from lowmem.training.module import CausalLM, Update

SOURCE = Path(__file__).parents[1] / "src"

ASKS = {("hasattr", 2), ("getattr", 3)}  # a getattr without a default raises
# (file, name) -> why it may be asked for by name, although a class of ours has the same name
THEIRS = {
    ("techniques/adapter/lora.py", "bias"): "a setting of peft",
    ("model/auxiliary_loss.py", "config"): "of a model of transformers, or of a bare nn.Module",
    ("command/cli.py", "stream"): "of a handler of logging",
    (
        "techniques/loss/head_tiles.py",
        "source",
    ): "an attribute that is set on an nn.Linear of transformers, by who holds its weight",
    ("techniques/optim/build.py", "func"): "of a functools.partial, or of a class",
    ("techniques/precision/weights_16bit.py", "ranks"): "Lightning converts any nn.Module, and CausalLM stands above",
    ("config/declarations.py", "declares"): "a group may be any model of the schema, or none",
}


def asked(source: Path) -> set[tuple[str, str]]:
    """(file, name) of each `hasattr(x, "name")` and `getattr(x, "name", default)` whose name a class of ours has."""
    files = {str(file.relative_to(source / "lowmem")): file for file in (source / "lowmem").rglob("*.py")}
    trees = {name: ast.parse(file.read_text()) for name, file in files.items()}
    own = {name for tree in trees.values() for name in members(tree)}
    return {(file, name) for file, tree in trees.items() for name in names_asked_for(tree) if name in own}


def members(tree: ast.AST):
    """Names of methods, and of what is assigned in a class or to `self`."""
    for ours in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line in ours.body:
            if isinstance(line, ast.FunctionDef):
                yield line.name
            elif isinstance(line, ast.Assign | ast.AnnAssign):
                yield from (node.id for node in ast.walk(line) if isinstance(node, ast.Name))
        yield from (node.attr for node in ast.walk(ours) if assigned_to_self(node))


def assigned_to_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def names_asked_for(tree: ast.AST):
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in (call for call in calls if (ast.unparse(call.func), len(call.args)) in ASKS):
        if isinstance(call.args[1], ast.Constant):
            yield call.args[1].value


def test_no_protocol_hides_behind_hasattr():
    assert asked(SOURCE) == THEIRS.keys()


@pytest.mark.wrong
@pytest.mark.parametrize(
    "line", ['hasattr(it, "step_from")', 'getattr(it, "chat", None)', 'getattr(it, "limit", 0)', 'hasattr(it, "size")']
)
def test_one_that_does_is_found(line, tmp_path):
    folder = tmp_path / "lowmem"
    folder.mkdir()
    (folder / "theirs.py").write_text(
        "class Ours:\n    chat = None\n    size: int\n\n    def step_from(self):\n        self.limit = 1\n"
    )
    asks = folder / "asks.py"
    asks.write_text(f"found = {line}")
    assert len(asked(tmp_path)) == 1
    asks.write_text(f"found = {line}".replace("(it, ", "(it, name) or (").replace(", None)", ")").replace(", 0)", ")"))
    assert not asked(tmp_path)


def test_a_source_that_cannot_be_opened_is_refused(config):
    """A yaml may name anybody's class, one from before there were base classes too."""
    run = config()
    with pytest.raises(Refused, match=r"this makes a dict, which cannot be opened\. Derive it from Stored"):
        build.open_texts(run.replacing("data", {"_target_": "builtins.dict"}))


def test_a_part_of_a_mixture_that_cannot_be_opened_is_refused_by_its_name():
    with pytest.raises(Refused, match=r"data\.parts\.mine\._target_=.*makes a dict, which cannot be opened"):
        Mix({"mine": {}})


class Scaled(Loss, nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def __call__(self, model, batch):
        return self.scale * full(model, batch)


class Compared(Scaled):
    def verify(self, model, batch):
        pass


def test_a_loss_that_is_a_module_keeps_its_buffers():
    module = CausalLM(nn.Linear(2, 2), Scaled(), Update(None, None))
    assert "loss.scale" in module.state_dict()


def test_a_loss_says_by_its_verify_that_it_makes_the_logits_itself():
    assert Compared().own_logits and Chunked(4).own_logits and not Scaled().own_logits
    assert not as_loss(full).own_logits and isinstance(as_loss(partial(full)), Loss)


@pytest.mark.parametrize("made", [nn.Linear(1, 1), SimpleNamespace(verify=print)])
def test_an_object_that_is_no_loss_is_refused(made):
    """Its `verify` would not be called, and its buffers not be saved."""
    with pytest.raises(
        Refused, match=r"which is no loss\. Derive it from Loss of lowmem\.techniques\.loss\.cross_entropy"
    ):
        as_loss(made)
