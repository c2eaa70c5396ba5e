"""A config is settled once: a `Run` is frozen, follows what becomes known later, and is what everything else reads."""

import ast
import re

import pytest
from pydantic import ValidationError

from conftest import ROOT
from lowmem.config.settle import run_of, settled
from lowmem.config.typed_lines import composed
from lowmem.model.loading import architecture
from lowmem.system.errors import Refused

# Hydra hands its config to the command line, to help and to callbacks. `typed_lines` composes one, and `settle` is the
# last to have it.
FILES_WITH_CONFIG = {"cli", "help", "folder_lock", "sweep", "typed_lines", "settle"}
ENTRANCES = {"fit", "job"}  # notebooks call `fit` and `plan` with a composed config, which is settled first
WITH_CONFIG = re.compile(r"\b(DictConfig|Config)\b")

PARAMETERS = 6  # of a function at most, `self` included
# Functions that have more, each group for one reason.
KEYS_OF_YAML = {  # their parameters are keys of conf/, which people type
    "data.sources.text_files.text",
    "data.sources.hub.hub",
    "data.sources.preference.Preference.__init__",
    "data.sources.tables.table_csv",
    "techniques.optim.muon.Muon.__init__",
    "techniques.weights.streamed.Streamed.__init__",
    "report.wandb.logger",
}
CALLED_BY_TORCH = {  # with these arguments
    "techniques.loss.cross_entropy._ChunkedCrossEntropy.forward",
    "plan.tracing.attend.Attend.__call__",
    "model.document_attention.attend",  # by transformers
    "model.document_attention.first_tokens_or_mask",
    "techniques.loss.tiled._TiledCrossEntropy.forward",
}
KEYS_OF_SEVERAL = {"data.sources.records.records"}  # the keys that the yamls of all records have


def test_a_run_does_not_change():
    run = run_of([])
    for one, key in ((run, "lr"), (run.model, "name"), (run.optim, "lr"), (run.trainer.plugins, "precision")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(one, key, 1)


def test_a_configuration_of_transformers_changes_nothing_of_it():
    """Some write into the mappings that they are made of, such as rope_scaling."""
    run = run_of(["model=qwen3-0.6b", "model.pretrained=false"])
    others = {key: value for key, value in run.model.architecture.items() if key != "rope_parameters"}
    run = run.replacing("model.architecture", others | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    architecture(run.model)
    assert run.model.architecture["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_what_becomes_known_is_followed_by_what_depends_on_it():
    run = run_of(["scheduler=cosine"])
    later = run.knowing(max_steps=77)
    assert later.scheduler.total_steps == 77 == later.max_steps and run.scheduler.total_steps == run.max_steps != 77
    alone = run.resolved().knowing(max_steps=77)
    assert alone.scheduler.total_steps == run.max_steps and alone.max_steps == 77


def test_of_a_key_that_is_replaced_nothing_is_left():
    run = run_of([])
    other = {"model_type": "llama"}
    assert "n_layer" in run.knowing(model={"architecture": other}).model.architecture
    assert run.replacing("model.architecture", other).model.architecture == other


def test_all_that_is_wrong_is_said_at_once_and_a_run_is_taken_as_it_is():
    with pytest.raises(Refused) as refusal:
        settled(composed(["lr=-1", "max_steps=0", "+optim.lrs=1e-3"]))
    assert str(refusal.value).count("\n") >= 1 and "lr=-1" in str(refusal.value) and "max_steps=0" in str(refusal.value)
    run = run_of([])
    assert settled(run) is run and settled(composed([])).as_dict() == run.as_dict()


def knowing(source) -> dict[str, list[str]]:
    """File -> its functions that take a DictConfig, for every file that names one, or an alias of it."""
    found = {}
    for file in source.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if {"DictConfig", "OmegaConf", "Config"} & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            found[file.stem] = [one.name for one in functions if WITH_CONFIG.search(ast.unparse(one.args))]
    return found


def test_few_files_know_what_a_config_is():
    found = knowing(ROOT / "src")
    assert found.keys() == FILES_WITH_CONFIG | ENTRANCES
    assert sum(map(len, found.values())) <= 15, found


@pytest.mark.wrong
def test_one_that_does_is_seen(tmp_path):
    (tmp_path / "late.py").write_text("def late(cfg: DictConfig) -> None: ...\n")
    assert knowing(tmp_path) == {"late": ["late"]}


def with_many_parameters(source) -> set[str]:
    """<module>.<class>.<function> of each that has more than PARAMETERS."""
    found = set()

    def look(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = node.args
            every = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, (own.vararg, own.kwarg))]
            found.update({name} if len(every) > PARAMETERS else ())
        for child in ast.iter_child_nodes(node):
            look(child, f"{name}.{child.name}" if hasattr(child, "name") else name)

    for file in source.rglob("*.py"):
        look(ast.parse(file.read_text(encoding="utf-8")), ".".join(file.relative_to(source).with_suffix("").parts))
    return found


def test_no_function_has_more_than_six_parameters():
    assert with_many_parameters(ROOT / "src" / "lowmem") == KEYS_OF_YAML | KEYS_OF_SEVERAL | CALLED_BY_TORCH


def test_parameters_that_are_said_to_be_keys_of_a_yaml_are():
    said = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "conf").rglob("*.yaml"))
    targets = {f"_target_: lowmem.{name.removesuffix('.__init__')}\n" for name in KEYS_OF_YAML}
    assert {target for target in targets if target not in said} == set()


def test_a_function_with_seven_is_seen_wherever_it_stands(tmp_path):
    (tmp_path / "deep.py").write_text(
        "class A:\n    def six(self, b, c, *, d, e=1, f=2): ...\n"
        "    def seven(self, b, /, c, *d, e, f=1, **g):\n        async def inner(a, b, c, d, e, f, g): ...\n"
        "if True:\n    def late(a, b, c, d, e, f, g): ...\n"
    )
    assert with_many_parameters(tmp_path) == {"deep.A.seven", "deep.A.seven.inner", "deep.late"}
