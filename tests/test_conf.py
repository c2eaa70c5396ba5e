"""Tests every yaml of conf/: it composes, its target classes exist and accept its keys, and a page documents it."""

import json
import re
import shutil

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conftest import ROOT
from lowmem.command import help
from lowmem.config import typed_lines
from lowmem.config.check import check, settled, targets
from lowmem.config.settle import Run, run_of
from lowmem.config.typed_lines import quoted
from lowmem.plan.advice import advice
from lowmem.plan.advice import out_of_memory as out_of_memory_text
from lowmem.plan.target import Target
from lowmem.system.errors import Refused
from lowmem.system.units import GIB

CONF = ROOT / "conf"
CHOICES = sorted((f.parent.name, f.stem) for f in CONF.glob("*/*.yaml"))
TECHNIQUES = ("precision", "optim", "accumulation", "gradient_checkpointing", "compile")
TECHNIQUES += ("weights", "loss", "adapter")
# The pages that list choices. Each technique has a table row on one of these pages.
LISTS = {page: (ROOT / page).read_text() for page in ("README.md", "docs/techniques.md")}
# All names in the first cells of table rows. A row may list several choices.
NAMED = [
    name
    for text in LISTS.values()
    for cell in re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", cell)
]


# choice -> overrides that a user must type with it
GIVEN = {
    "data=text": ["data.path=x"],
    "data=jsonl": ["data.path=x"],
    "data=mix": ["+data@data.parts.a=stdlib"],
    "data=chat": ["data.path=x"],
    "data=preference": ["data.path=x"],
    "data=hub": ["data.path=x"],
    "data=csv": ["data.path=x"],
    "data=parquet": ["data.path=x"],
    "model=hf": ["model.name=x"],
    "weights=streamed": ["precision=bf16-master", "gradient_checkpointing=every_layer"],
    "accumulation=by_epoch": ["accumulation.sizes={0: 1, 1: 2}"],
    "accumulation=by_step": ["accumulation.sizes={0: 1, 1: 2}"],
}


def composed(group, choice):
    given = GIVEN.get(f"{group}={choice}", [])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "config", overrides=[quoted(f"{group}={choice}"), "device=cpu", *given], return_hydra_config=True
        )


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{g}={c}" for g, c in CHOICES])
@pytest.mark.usefixtures("as_with_compiler")
def test_config_with_a_choice_of_conf_passes_the_check_and_keeps_the_composed_values(group, choice):
    cfg = composed(group, choice)
    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert choices[group] == choice
    del cfg.hydra
    run = settled(cfg)
    check(run, choices)
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert run.as_dict() == values == Run.read(values).as_dict()
    assert all(getattr(run, key) == value for key, value in values.items() if not isinstance(value, dict | list))
    assert run.optim.plain() == values["optim"] and run.model.model_dump() == values["model"]


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{g}={c}" for g, c in CHOICES])
def test_yaml_of_conf_begins_with_a_comment_of_more_than_20_characters(group, choice):
    lines = [line for line in (CONF / group / f"{choice}.yaml").read_text().splitlines() if "@package" not in line]
    assert lines[0].startswith("# ") and len(lines[0]) > 20, f"conf/{group}/{choice}.yaml: say in a comment what it is"


@pytest.mark.parametrize(("group", "choice"), [c for c in CHOICES if c[0] in TECHNIQUES])
def test_technique_of_conf_has_a_table_row_in_readme_or_techniques_page(group, choice):
    assert f"{group}={choice}" in NAMED, (
        f"docs/techniques.md: add a row `{group}={choice}` | what it saves | what it costs"
    )


@pytest.mark.parametrize(("group", "choice"), [c for c in CHOICES if c[0] not in TECHNIQUES])
def test_choice_that_is_not_a_technique_is_named_in_readme_or_techniques_page(group, choice):
    assert any(f"`{choice}`" in text for text in LISTS.values())


def test_every_target_class_in_conf_is_in_the_package_or_a_dependency():
    for group, choice in CHOICES:
        cfg = composed(group, choice)
        del cfg.hydra
        for _, node in targets(OmegaConf.to_container(cfg, resolve=True)):
            assert node["_target_"].split(".")[0] in (
                "lowmem",
                "torch",
                "bitsandbytes",
                "torchao",
                "transformers",
                "lightning",
                "hydra",
            )


@pytest.mark.parametrize("optim", [choice for group, choice in CHOICES if group == "optim"])
def test_comment_of_an_optimizer_names_the_lr_factor_with_the_lowest_measured_loss(optim):
    measured = json.loads((ROOT / "benchmarks" / "results" / "learning_rates.json").read_text())["rounds"]
    # paging changes where the optimizer state is stored, not the result
    same = {"paged_adamw32bit": "adamw"}.get(optim, optim)
    losses = {name.split(" x ")[1]: one[0]["val_loss"] for name, one in measured.items() if name.split()[0] == same}
    if not losses:
        pytest.skip("add it to benchmarks/learning_rates.py and run that with --add")
    yaml = (CONF / "optim" / f"{optim}.yaml").read_text()
    assert re.search(r"^lr: .* # best on model=tiny: ([\d.]+) x the lr of AdamW$", yaml, re.M)[1] == min(
        losses, key=losses.get
    )


def test_out_of_memory_advice_suggests_only_unused_techniques_that_compose():
    used = {"precision": "bf16", "optim": "adamw", "gradient_checkpointing": "every_layer", "loss": "full"}
    tries = advice(used, batch_size=8, seq_len=128, windows={0: 1})
    assert tries == [
        "optim=adam8bit",
        "batch_size=4 accumulation=fixed accumulation.batches=2",
        "loss=chunked",
        "adapter=lora",
        "seq_len=64",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for line in tries:
            compose("config", overrides=[quoted(part) for part in line.split()])
    assert "weights" in out_of_memory_text("device", {"weights": 2**30}, tries)


@pytest.mark.parametrize(
    ("accumulation", "windows", "more"),
    [
        ("none", {0: 1}, " accumulation=fixed accumulation.batches=2"),
        ("fixed", {0: 4}, " accumulation=fixed accumulation.batches=8"),
        ("effective_batch", {0: 8}, ""),
        ("by_epoch", {0: 1, 3: 4}, " accumulation.sizes='{0: 2, 3: 8}'"),
    ],
)
def test_out_of_memory_advice_with_half_the_batch_size_keeps_the_effective_batch_size(accumulation, windows, more):
    assert f"batch_size=4{more}" in advice({"accumulation": accumulation}, 8, 128, windows)


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        ("tiny", 2.615),
        ("gpt2", 124.44),
        ("gpt2-medium", 354.82),
        ("gpt2-large", 774.03),
        ("gpt2-xl", 1557.61),
        ("llama-3.2-1b", 1235.81),
        ("llama-3.2-1b-instruct", 1235.81),
        ("smollm2-135m", 134.52),
        ("llama-3.1-8b", 8030.26),
        ("llama-3.1-70b", 70553.71),
        ("qwen3-0.6b", 596.05),
        ("qwen3-8b", 8190.74),
        ("qwen2.5-1.5b-instruct", 1543.71),
        ("qwen3-30b-a3b", 30532.12),
        ("gpt-oss-20b", 20914.76),
    ],
)
def test_model_of_conf_has_the_parameter_count_of_the_published_model(model, millions):
    """The model is built on the meta device. The expected counts come from the published checkpoints."""
    import torch

    from lowmem.config.schema import Model
    from lowmem.model import loading as models

    spec = Model.model_construct(**OmegaConf.to_container(composed("model", model).model) | {"pretrained": False})
    with torch.device("meta"):
        network = models.load(models.Described(spec, models.architecture(spec)), torch.float32)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)


PRESETS = sorted(yaml.stem for yaml in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_states_its_measurement_and_yields_to_typed_overrides(preset):
    head = (CONF / "experiment" / f"{preset}.yaml").read_text().split("defaults:")[0]
    assert re.search(r"^# (Measured|Predicted)", head, re.M) and "GiB" in head
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"experiment={preset}", "lr=0.5", "optim=sgd"])
    check(settled(cfg), {})
    assert cfg.lr == 0.5 and "SGD" in cfg.optim._target_


@pytest.mark.rows("*-baseline", "*-chat_lora_8gb")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("line", ["accumulation=none", "loss=full", "data=random", "model=tiny"])
def test_choice_typed_beside_a_preset_drops_keys_that_the_preset_sets_in_this_group(preset, line):
    """For example, accumulation=none must drop the key accumulation.size of a preset with
    accumulation=effective_batch."""
    group, experiment = line.split("=")[0], OmegaConf.load(CONF / "experiment" / f"{preset}.yaml")
    cfg = typed_lines.composed([f"experiment={preset}", line, "seq_len=128"])
    plainly, hydras = typed_lines.composed([line]), typed_lines._composed([f"experiment={preset}", line])
    check(settled(cfg), {})
    # If the preset makes the typed choice itself, its keys stay.
    kept = {f"override /{group}": line.split("=")[1]} in experiment.defaults
    same = OmegaConf.to_container(cfg[group]) == OmegaConf.to_container((hydras if kept else plainly)[group])
    assert same


def unresolved(cfg):
    return OmegaConf.to_container(cfg.accumulation)


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (["experiment=[debug,combine_all]", "accumulation=none"], []),
        (["experiment=[combine_all,baseline]", "accumulation=none"], []),
        (["experiment=[combine_all,gpt2_xl_12gb]", "accumulation=none"], []),
        (["experiment=[combine_all,gpt2_xl_12gb]", "accumulation=fixed"], ["accumulation.batches=4"]),
        (["experiment=[combine_all,gpt2_xl_12gb]", "accumulation=effective_batch"], ["accumulation.size=64"]),
        (["experiment=[combine_all, gpt2_xl_12gb]", "accumulation=effective_batch", "accumulation.size=8"], []),
        (["experiment=[gpt2_xl_12gb,combine_all]", "accumulation=fixed"], ["accumulation.batches=4"]),
    ],
    ids=lambda lines: " ".join(lines) or "none",
)
def test_choice_typed_beside_several_experiments_wins_and_keeps_keys_of_experiments_with_this_choice_only(lines, kept):
    cfg = typed_lines.composed([*lines, "model=tiny", "seq_len=128"])
    check(settled(cfg), {})
    assert unresolved(cfg) == unresolved(typed_lines.composed([*lines[1:], *kept]))


def test_last_of_several_experiments_decides_the_accumulation_choice_and_its_keys():
    for names, line in (("combine_all,gpt2_xl_12gb", "size=64"), ("gpt2_xl_12gb,combine_all", "batches=4")):
        choice = "fixed" if "batches" in line else "effective_batch"
        alone = typed_lines.composed([f"accumulation={choice}", f"accumulation.{line}"])
        assert unresolved(typed_lines.composed([f"experiment=[{names}]"])) == unresolved(alone)


def test_experiment_with_self_in_its_defaults_composes_and_yields_to_a_typed_choice(tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    experiment = "# @package _global_\ndefaults: [override /accumulation: fixed, _self_]\naccumulation: {batches: 4}\n"
    (tmp_path / "conf" / "experiment" / "16.yaml").write_text(experiment)
    monkeypatch.setattr(typed_lines, "CONF", tmp_path / "conf")
    for typed in ("experiment=16", "experiment=[debug,16]"):
        assert typed_lines.composed.now([typed]).accumulation.batches == 4
        assert typed_lines.composed.now([typed, "accumulation=none"]).accumulation.batches == 1


# bytes resident in a run before its model is loaded; this process may have more, from earlier tests
LIBRARIES = 450 * 2**20
CARDS = [name for name in PRESETS if re.search(r"\dgb$", name) or name == "continue_pretraining"]


@pytest.mark.matrix
@pytest.mark.parametrize("preset", CARDS)
def test_memory_stated_by_a_preset_equals_the_prediction(preset):
    from lowmem.plan.prediction import predict

    said = help.heading(CONF / "experiment" / f"{preset}.yaml")
    tensors, reserved = re.search(r"([\d.]+) GiB of tensors, ([\d.]+) GiB reserved", said).groups()
    found = predict(run_of([f"experiment={preset}", "device=cpu"]), Target(on_card=True)).based_on(LIBRARIES)
    host = float(re.search(r"([\d.]+) GiB of host memory", said)[1])
    assert host == pytest.approx(found.host.total / GIB, abs=0.2)  # memory of imported libraries differs by machine
    assert f"{found.allocated / GIB:.1f}" == tensors
    assert f"{found.reserved / GIB:.1f}" == reserved


def test_conf_contains_the_presets_baseline_combine_all_debug_and_recipes_for_cards():
    assert set(PRESETS) >= {"baseline", "combine_all", "gpt2_xl_12gb", "llama_1b_8gb", "debug", *CARDS}
    assert set(CARDS) >= {"chat_lora_8gb", "chat_full_24gb", "continue_pretraining", "qlora_8b_12gb", "qlora_8b_4gb"}


def test_combine_all_preset_uses_the_tokens_per_step_of_baseline():
    sizes = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for preset in ("baseline", "combine_all"):
            cfg = compose("config", overrides=[f"experiment={preset}"])
            sizes.append(cfg.batch_size * cfg.accumulation.get("batches", 1) * cfg.seq_len)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lowmem.loss.full", "lowmem.techniques.loss.cross_entropy.full"),
        ("lowmem.gradient_checkpointing.none", "lowmem.techniques.gradient_checkpointing.policies.none"),
        ("lowmem.adapter.freeze.none", "lowmem.techniques.adapter.freeze.none"),
        ("lowmem.optim.muon.Muon", "lowmem.techniques.optim.muon.Muon"),
        ("lowmem.loss.of_nobody", None),
        ("theirs.loss.full", None),
    ],
)
def test_target_class_that_cannot_be_imported_is_refused_with_its_new_path_if_it_has_moved(old, new, config):
    run = config(f"loss._target_={old}")
    with pytest.raises(Refused) as refused:
        check(run, {})
    assert f"{old} cannot be imported" in str(refused.value)
    assert (f"It has moved: type {new}." in str(refused.value)) == (new is not None)
    assert ("It has moved" in str(refused.value)) == (new is not None)
