"""Tests that every command line gives a config that can be built or an error message, never a traceback or a hang."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import HydraException
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conftest import ROOT
from lowmem.command import cli
from lowmem.config import check, schema, spelling
from lowmem.config.check import check as checked
from lowmem.config.check import settled
from lowmem.config.instantiate import instantiate
from lowmem.config.spelling import keys_of
from lowmem.config.typed_lines import CONF, TEXTS, composed, is_group, parted, quoted, unquoted
from lowmem.plan import table
from lowmem.plan.search.recipes import Recipe
from lowmem.system.errors import Refused
from lowmem.training.build import optimizer
from typed import typed_run

# --- lines that once ended in a traceback, or were silently accepted -------------------------------------------------

REFUSED = {
    "precison=16": "there is no key precison. Type precision=16.",
    "+precison=16": "there is no key precison. Type precision=16.",
    "precison=fp16": "Type precision=16, or one of 16-master, ",
    "precision=16-mixed": "precision=16-mixed: there is no such choice. Type precision=16, or one of ",
    "precision=bf16-mixed": "precision=bf16-mixed: there is no such choice. Type precision=bf16, or one of ",
    "precision=32-true": "precision=32-true: there is no such choice. Type precision=32, or one of ",
    "optim=adamw_fp8": "optim=adamw_fp8 was removed: float8 rounds small second moments to zero, so the weights of "
    "rare tokens grew without bound. Type optim=adamw8bit.",
    "strategy=deepspeed_zero3": "strategy=deepspeed_zero3 was removed: PyTorch's FSDP shards weights, gradients and "
    "optimizer state, and strategy=fsdp_offload replaces strategy.offload=true. Type strategy=fsdp.",
    "weights_dtype=bfloat16": "weights_dtype was removed: precision= also chooses the dtype of the weights.",
    "weights.steps_in=device": "weights.steps_in was removed: precision=bf16-sr runs its optimizer where the weights",
    "gradient_checkpointing=budget": "gradient_checkpointing=budget was removed: the budget is now a setting of "
    "compile=blocks and replaces gradient_checkpointing.fraction. Type gradient_checkpointing=none compile=blocks "
    "compile.activation_memory_budget=0.5.",
    "precision=bf61": "precision=bf61: there is no such choice. Type precision=bf16, or one of 16, ",
    "optim=adam8bits": "Type optim=adam8bit, or one of ",
    "otpim=sgd": "Type optim=sgd.",
    "max_step=3": "Type max_steps=3.",
    "+max_step=3": "Type max_steps=3.",
    "++max_step=3": "Type max_steps=3.",
    "+memory.snapshop=true": "Type memory.snapshot=true.",
    "checkpoint.every=2": "there is no key checkpoint.every. Type save_every=2.",
    "logging_steps=2": "Type log_every=2.",
    "optimizer=sgd": "Type optim=sgd.",
    "lora=true": "lora=true: there is no key lora. Type adapter=lora.",
    "adam8bit=1": "there is no key adam8bit. Type optim=adam8bit.",
    "bf16=true": "there is no key bf16. Type precision=bf16.",
    "model=/tmp": "this is a path or a hub id, not a choice of model. Type model=hf model.name=/tmp.",
    "model=Qwen/Qwen3-0.6B": "Type model=hf model.name=Qwen/Qwen3-0.6B.",
    "'model=../my models'": "Type model=hf 'model.name=../my models'.",
    "adapter=runs/1/model": "Type adapter=lora adapter.path=runs/1/model.",
    "data=./notes.txt": "Type data=text data.path=./notes.txt.",
    "data=/tmp/talks.jsonl": "Type data=jsonl data.path=/tmp/talks.jsonl.",
    "data=somebody/talks": "Type data=hub data.path=somebody/talks.",
    "learning_rate=1e-4": "Type lr=1e-4.",
    "precision.declares.tried=nan": "a run cannot change what a technique declares",
    "-m optim=sgd,adamw optim.declares={}": "a run cannot change what a technique declares",
    "warmup_steps=3": "Type scheduler.warmup_steps=3.",
    "hydra.run.dri=x": "Type hydra.run.dir=x.",
    "model.foo=3": "there is no key model.foo. Type --help for a list of all keys.",
    "hydra/launcher=slrum": "Type hydra/launcher=slurm",
    "model.architecture.n_layers=3": "Type model.architecture.n_layer=3.",
    "model.architecture={n_embd:32,depth:3}": "If the architecture has it, type +model.architecture.depth=3.",
    "'memory= {limits: null}'": "Type memory.limit=null.",
    "model.architecture={depth:null}": "type +model.architecture.depth=null.",
    "\"model.architecture={rope:{a:1,b:[x,'2']}}\"": "model.architecture.rope={a:1,b:[x,'2']}: the yaml of this model",
    "memory={limits:1GiB}": "memory.limits=1GiB: there is no key memory.limits. Type memory.limit=1GiB.",
    "callbacks={in_backward:{enable:1}}": "Type callbacks.in_backward.enabled=1.",
    "loss.rows=7": "only some choices of loss have this key. Also type loss=chunked.",
    "+lr=3": "this key already exists, so leave out the +. Type lr=3.",
    "~nothing": "there is no key nothing to remove.",
    "--max_steps=3": "there is no such flag. Type max_steps=3, without dashes, or --help.",
    "max_steps": "this is not an override. Type max_steps=<value>",
    "--mulitrun": "there is no such flag. Type --multirun, or --help.",
    "--multirun=1": "there is no such flag. Type --multirun, or --help.",
    "-m lr=1,2 --cfg job": "--cfg: this flag shows the config of one run, but -m starts several. Leave -m out.",
    "hydra=null": "hydra is a section, not a group. Type hydra.<key>=<value>",
    "hydra.run.dir=": "the value is empty. Type hydra.run.dir=<a folder>",
    "hydra.sweep.dir=''": "the value is empty. Type hydra.sweep.dir=<a folder>",
    "cache_dir=": "the value is empty. Type cache_dir=<a folder>",
    "~fit": "this key is now called plan. Type plan=<value>.",
    "precision=16 trainer.plugins.precision.init_scale=8": "Type precision.init_scale=8.",
    "precision=bf16-master master.early_step=false": "Type precision.early_step=false.",
    "save_every=0min": "give a whole number of steps, at least 1, or minutes such as 30min.",
    "=3": "this is not an override. Type '<key>=3'",
    "lr=1e-3)": "Hydra cannot parse this value. Type text with special characters in quotes: ",
    "lr=1e-3,1e-4": "several values need -m, which starts a sweep. Type -m, or ",
    "max_steps=abc": "max_steps=abc: give a whole number of at least 1.",
    "seed=-1": "give a whole number from 0 to 4294967295.",
    "seed=99999999999999999999": "give a whole number from 0 to",
    "gradient_checkpointing=every_k gradient_checkpointing.k=auto": "give a whole number of at least 1.",
    "scheduler.warmup_steps={}": "give a whole number of at least 0.",
    "scheduler.total_steps=007": "give a whole number of at least 1.",
    "loss=chunked \"loss.rows='7'\"": "loss.rows=7: give a whole number of at least 1.",
    "accumulation=effective_batch accumulation.devices=12GiB": "give a whole number of at least 1.",
    "accumulation=by_step accumulation.sizes={a:1}": "such as {0:1,3:4}.",
    "optim.lr=[]": "give a positive learning rate",
    "optim.betas=[0.9,2]": "give two numbers of at least 0 and below 1",
    "optim.weight_decay=-1": "give a number of at least 0.",
    "optim._partial_=false": "give true, as in its yaml.",
    "cache_dir=null": "cache_dir=null: give a file or a folder.",
    "data=text data.path=": "data.path=: give a file or a folder.",
    "data=text data.path=x data.pattern=/abs": "give a file pattern relative to the folder",
    "data=text data.path=x data.val_path=./x": "also data.path, so validation would run on training data",
    "\"model.architecture.n_layer='a b'\"": "give a whole number of at least 1.",
    "model.architecture=1": "model.architecture=1: set its keys, such as model.architecture.n_layer=6.",
    "model.attention=true": "model.attention=true: give a string.",
    "~optim": "every run needs a choice for optim. Type optim=<one of ",
    "optim=null": "every run needs a choice for optim. Type optim=<one of ",
    "precision=null": "every run needs a choice for precision. Type precision=<one of ",
    "logger=true": "logger=true: there is no such choice. Type logger=<one of csv, ",
    "~clip": "clip has no value: type clip=<value>.",
    "lr=???": "lr has no value: type lr=<value>.",
    "~optim.lr": "optim.lr has no value: type optim.lr=<value>.",
    "~callbacks": "callbacks has no value",
    "callbacks=null": "callbacks=null: give a mapping of names to nodes, each with a _target_.",
    "memory=null": "memory=null: set its keys: limit, snapshot.",
    "'lr=${nope}'": "lr: Interpolation key 'nope' not found. Type a value, or ${<key>} with an existing key.",
    "'lr=${oc.env:NOPE}'": "'NOPE' not found",
    "'model.lr=${lr}'": "Recursive interpolation",
    "+trainer.accelerator=gpu": "trainer.accelerator=gpu: leave it out, and set device instead.",
    "+trainer.precision=16": "trainer.precision=16: leave it out, and set precision instead.",
    "optim=adafactor optim.relative_step=true": "give false",
    "optim=adafactor 'optim.scale_parameter={a: 1}'": "give true or false.",
    "\"output_dir='a,b'\"": "leave it out, and set hydra.run.dir instead.",
    "callbacks.in_backward.enabled={}": "give true or false.",
    "+callbacks.mine.seed=1": "callbacks.mine._target_ has no value",
    "callbacks.in_backward=null": "callbacks.in_backward=null: give a _target_ and its arguments.",
    "+trainer.plugins.mine=1": "trainer.plugins.mine=1: give a _target_ and its arguments.",
    "optim=adam8bit optim.declares.saves.optimizer=x": "a run cannot change what a technique declares",
    "model=llama-3.2-1b model.architecture.rope_parameters.rope_theta=abc": "give a number.",
    "debug=1": "give true or false.",
    "epochs=2 max_steps=3": "epochs and max_steps: set only one of these two keys. Leave the other out.",
    "scheduler.warmup=0.1 scheduler.warmup_steps=3": "scheduler.warmup_steps: set only one of these two keys.",
    "scheduler.warmup=3": "give a share of all steps from 0 to 1, such as 0.03, or null.",
    "epochs=0": "epochs=0: give a whole number of at least 1, or null.",
    "data=hub data.path=x data.streaming=true": "on a stream before training starts. Type tokenizer=",
    "data=mix": "data=mix: no sources are set. Type +data@data.parts.<name>=text",
    "data=mix +data@data.parts.a=random 'data.shares={b: 1}'": "give one share for each source (a), or null.",
    "data=csv data.path=x data.delimiter=ab": "data.delimiter=ab: give one character, such as ';', or the word tab.",
    "tokenizer=": "tokenizer=: give a folder or a hub id, or null for the model's tokenizer.",
}


@pytest.mark.parametrize("line", REFUSED)
def test_invalid_override_is_refused_in_one_line_with_its_reason_or_a_correction(line):
    with pytest.raises(Refused) as refusal:
        typed_run(shlex.split(line))
    assert REFUSED[line] in str(refusal.value) and "\n" not in str(refusal.value)


MISSPELT = {"batchsize": "batch_size", "bach_size": "batch_size", "seqlen": "seq_len", "seq_length": "seq_len"}
MISSPELT |= {"epoch": "epochs", "seeds": "seed", "sed": "seed", "lrr": "lr", "l_r": "lr", "clipp": "clip"}
MISSPELT |= {"devise": "device", "weigths": "weights", "tokeniser": "tokenizer", "cachedir": "cache_dir"}
MISSPELT |= {"modle": "model", "merg": "merge", "tile.token": "tile.tokens", "scheduller": "scheduler"}
MISSPELT |= {"early_stop.patence": "early_stop.patience"}
OTHER_WORDS = "banana foo workers shuffle port rank gpus stride lang output path dtype layers sweep mode_of lora_r"


def test_misspelt_key_is_corrected_to_the_nearest_key_and_an_unrelated_word_to_none():
    known = {*spelling.keys_of(OmegaConf.to_container(composed([], whole=True), resolve=False)), *GROUPS}
    assert {word: spelling.nearest(word, known) for word in MISSPELT} == MISSPELT
    assert {word: near for word in OTHER_WORDS.split() if (near := spelling.nearest(word, known))} == {}


@pytest.mark.parametrize("more", ["tokenizer=x", "model.pretrained=true"])
def test_streaming_with_a_tokenizer_or_a_pretrained_model_is_accepted(more):
    assert typed_run(["data=hub", "data.path=x", "data.streaming=true", more])


@pytest.mark.parametrize("delimiter", [";", "|", "tab", " "])
def test_csv_delimiter_of_one_character_or_the_word_tab_is_accepted(delimiter):
    assert typed_run(["data=csv", "data.path=x", f"data.delimiter='{delimiter}'"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["data=jsonl", "data.path=.", "data.prompt=q"],
            "data.completion is not set. Type data.completion=<a field>.",
        ),
        (
            ["data=hub", "data.path=.", "data.prompt=q", "data.messages=m"],
            "data.prompt and data.messages: a record is either text",
        ),
        (["tokenizer=/no/such"], "tokenizer=/no/such: there is no such folder. Give one that exists, or a hub id"),
        (
            ["weights=streamed", "weights.drive=/proc/drive"],
            "weights.drive=/proc/drive: no file can be written there (No such file or directory). Type a writable",
        ),
        (["data=mix", "+data.parts.a.path=/no/such"], "data.parts.a.path=/no/such: there is no such file or folder"),
        (["data=text", "data.path=.", "data.val_path={}"], "data.val_path={}: there is no such file"),
        (["data=text", "data.path=.", "data.val_path=[a,b]"], "Several paths need names, as in {news:a,wiki:b}."),
    ],
)
def test_nonexistent_or_unwritable_path_or_inconsistent_data_keys_are_refused_by_the_check_of_places(lines, said):
    with pytest.raises(Refused, match=re.escape(said)):
        check.check_places(typed_run(lines))


def test_existing_folder_typed_as_data_choice_is_suggested_as_data_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for line, says in (
        ("data=notes", "Type data=text data.path=notes."),
        ("data=note", "data=note: there is no such choice."),
    ):
        with pytest.raises(Refused, match=re.escape(says)):
            cli.prepare([line])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe"])
def test_architecture_with_only_model_type_and_vocab_size_is_accepted(model_type):
    architecture = f"model.architecture={{model_type: {model_type}, vocab_size: 300}}"
    run = settled(composed(["model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3", architecture]))
    assert run.model.architecture == {"model_type": model_type, "vocab_size": 300}


def test_three_invalid_overrides_are_reported_in_one_line_each():
    with pytest.raises(Refused) as refusal:
        typed_run(["max_steps=0", "lr=a", "+seeds=1"])
    assert len(str(refusal.value).splitlines()) == 3  # no further lines for keys that interpolate lr and max_steps


def test_invalid_values_and_unknown_keys_are_composed_without_an_error_before_the_schema_checks():
    for line in ("max_steps=abc", "+precison=16", "clip=true", "optim.lr=[]", "+trainer.accelerator=gpu"):
        composed(cli.prepare([line]))


def test_added_argument_of_a_wrong_type_or_unknown_to_its_class_is_refused():
    for line, says in (("+optim.amsgrad=often", "optim.amsgrad=often: give true or false."), ("+loss.x=1", "'x'")):
        with pytest.raises(Refused, match=says):
            checked(typed_run([line, "loss=chunked"]), {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lr=glob(*)", "lr=glob(*): glob() lists the choices of a group, but lr is not a group"),
        ("data.path=glob(*.txt)", "Type data.path=<value>,<value>."),
        ("seed=1,glob(2*)", "but seed is not a group. Type seed=<value>,<value>."),
        ("optim=glob(xyz*)", "optim=glob(xyz*): there is no such choice. Type optim=<one of adafactor, "),
        ("optim=glob(xyz*),glob(no*)", "there is no such choice."),
        ("optim=glob(adam*),sdg", "optim=sdg: there is no such choice. Type optim=sgd, or one of"),
    ],
)
def test_sweep_glob_that_matches_no_choice_or_is_on_a_plain_key_is_refused(line, says):
    with pytest.raises(Refused, match=re.escape(says)):
        cli.prepare(["-m", "data=text", line])


def test_advised_quoting_of_an_override_keeps_the_typed_value():
    (advice,) = shlex.split(
        spelling._unreadable("hydra.sweep.subdir=lr=${seed}").partition("in quotes: ")[2].removesuffix(".")
    )
    assert composed([advice], whole=True).hydra.sweep.subdir == "lr=0"


def test_sweep_key_missing_in_one_job_is_explained_as_in_a_single_run():
    typed = ["optim=adamw,sgd", "optim.betas=[0.8,0.9]"]
    with pytest.raises(Refused) as single:
        typed_run(["optim=sgd", typed[1]])
    assert spelling.explained(HydraException(), typed) == str(single.value)
    assert str(single.value).startswith(
        "optim.betas=[0.8,0.9]: only some choices of optim have this key. Also type optim=adam8bit or "
    )
    assert "this key already exists" in spelling.explained(HydraException(), ["optim=sgd,adamw", "+optim.betas=[0,0]"])


def test_unknown_choices_and_keys_are_refused_in_a_sweep():
    for line in ("precision=16,bf61", "optim=null,adamw", "precisio"):
        with pytest.raises(Refused):
            cli.prepare(["-m", line])


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_multirun_flag_at_any_position_gives_the_same_sweep(flag):
    lines = ["precision='32','16'", "lr=0.1,0.2"]
    for place in range(3):
        typed = [unquoted(line) for line in lines]
        assert cli.prepare([*typed[:place], flag, *typed[place:]]) == [flag, *lines]
    assert parted(["lr=1", "--cfg", "job", "-m", "job"]) == (["--cfg", "job", "-m"], ["lr=1"], ["job"])


@pytest.mark.process
@pytest.mark.parametrize(
    "line",
    [
        *("max_steps=abc", "precison=16", "~optim", "+max_step=3", "max_steps", "-m optim=adamx"),
        *("resume=/none", "evaluate=auto", "export=/dev/null/x", "data=text data.path=/none"),
        *("data=text data.path=. data.val_path=/none", "data=text data.path=. data.encoding=klingon"),
        "data=text data.path=. data.on_error=explode",
    ],
)
def test_invalid_command_prints_one_line_before_torch_is_imported_and_leaves_no_files(line, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    places = [f"hydra.{kind}.dir={tmp_path}/run" for kind in ("run", "sweep")]
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(line), *places]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert any(word in done.stderr for word in ("ype ", "ive ", "Runs are under")), done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"torch.py", "__pycache__"}


# --- text as typed ---------------------------------------------------------------------------------------------------


def test_evaluation_of_a_merged_model_uses_the_overrides_of_its_run_without_the_adapter(tmp_path):
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    lines = "- adapter=qlora\n- adapter.r=8\n- freeze=[*lora_A*]\n- precision=bf16-true\n"
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text(lines)
    model = tmp_path / "run" / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    merged = cli.prepare([f"evaluate={model}"])
    assert [line for line in merged if "adapter" in line or "freeze" in line] == ["adapter=none"]
    assert "precision=bf16-true" in merged
    assert "adapter=dora" in cli.prepare([f"evaluate={model}", "adapter=dora"])
    (model / "adapter_config.json").write_text("{}")
    assert "adapter.r=8" in cli.prepare([f"evaluate={model}"])


AWKWARD = [
    "Müller's (old) notes, 2026",
    "a=b",
    "#h",
    "数据",
    "a b",
    "[a]",
    "{a: 1}",
    "7",
    "1e-3",
    "true",
    "'tis",
    'the "new" ones',
    "back\\slash",
    "ends in \\",
    "a'b\\'c",
    "tag(a,b)",
    "x, y,z",
    "@!%&;|<>?*$HOME`",
    "$x",
    " padded ",
]


@pytest.mark.parametrize("value", AWKWARD)
def test_path_with_special_characters_needs_no_inner_quotes(value):
    keys = ("data.path", "model.name", "resume", "cache_dir", "hydra.run.dir", "logger.wandb.name")
    typed = ["data=text", *(f"{key}={value}" for key in keys)]
    read = cli.prepare(typed)
    cfg = composed(read, whole=True)
    assert [OmegaConf.select(cfg, key) for key in keys] == [value] * len(keys)
    assert [unquoted(line) for line in read] == typed


def text_values():
    return st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text_values(), st.sampled_from(TEXTS))
def test_text_value_is_quoted_once_and_read_back_unchanged(value, key):
    line = f"{key}={value}"
    assert quoted(quoted(line)) == quoted(line)
    if not re.match("~|['\"]", value):  # a home folder or a text in Hydra's quotes
        assert unquoted(quoted(line)) == line


def test_value_typed_in_the_quotes_of_hydra_is_read_without_quotes():
    assert composed(cli.prepare(["data=text", "data.path='a, b'"])).data.path == "a, b"
    assert composed(cli.prepare(["data=text", 'data.path="it\'s"'])).data.path == "it's"


def test_typed_tilde_expands_to_the_home_folder_and_null_to_none(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = composed(cli.prepare(["data=text", "data.path=~/notes", "data.val_path=null"]))
    assert cfg.data.path == f"{tmp_path}/notes" and cfg.data.val_path is None


def test_comma_in_a_sweep_separates_values_unless_the_whole_path_exists(tmp_path):
    there = tmp_path / "Müller's (old) notes, 2026"
    typed = ["-m", "data=text", f"data.path={there}", f"hydra.sweep.dir={tmp_path}/a, b", "model.name=a, b (c)"]
    read = cli.prepare(typed)
    assert read[2].endswith("/Müller\\'s (old) notes','2026'") and read[3].endswith("/a, b'")
    assert read[4] == "model.name=a,'b (c)'"
    there.mkdir()
    assert unquoted(cli.prepare(typed)[2]) == typed[2]
    assert cli.prepare(["-m", "data.path=choice(a,b)"])[1] == "data.path=choice(a,b)"


def test_printed_recipe_split_by_a_shell_gives_the_typed_overrides():
    typed = ["data=text", *(f"data.path={value}" for value in AWKWARD), "accumulation.sizes={0: 1, 3: 4}"]
    of_one = SimpleNamespace(devices=1, node=8)
    printed = table.command(typed, Recipe(("optim=sgd",), of_one, 0.0))
    assert shlex.split(printed) == ["python", "train.py", *typed, "optim=sgd"]


def test_run_on_a_path_with_special_characters_trains_and_stores_the_typed_path(command, text_folder, tmp_path):
    folder = tmp_path / "Müller's (old) notes, #h=1, 数据"
    folder.symlink_to(text_folder)
    typed = f"data.path={folder}"
    code, said = command(typed)
    assert code == 0, said
    assert typed in json.loads((tmp_path / "run" / "summary.json").read_text())["overrides"]
    again = cli.prepare([f"resume={tmp_path / 'run'}"])
    assert composed(again).data.path == str(folder)


@pytest.mark.process
def test_sweep_on_a_path_with_a_comma_and_a_quote_trains_and_stores_the_typed_path(command, text_folder, tmp_path):
    folder = tmp_path / "Müller's (old) notes, 2026"
    folder.symlink_to(text_folder)
    code, said = command(f"data.path={folder}", "seed=0,1", "-m")
    assert code == 0, said
    for job in "01":
        summary = json.loads((tmp_path / "sweep" / job / "summary.json").read_text())
        assert f"data.path={folder}" in summary["overrides"]


# --- the schema ------------------------------------------------------------------------------------------------------


def declared(kind) -> set[str]:
    return {".".join(path) for path, _ in schema._wordings(kind) if "*" not in path and "_target_" not in path}


def test_schema_declares_exactly_the_keys_of_the_config():
    cfg = composed(["precision=bf16-master"], "plan")
    groups = {key for key in cfg if is_group(key)} - {"model", "optim"}
    here = {key for key in keys_of(OmegaConf.to_container(cfg)) if key.partition(".")[0] not in groups}
    here -= {
        key for key in here if "_target_" in key or key.startswith(("model.architecture.", "callbacks.", "optim."))
    }
    extra = {f"trainer.{name}" for name in schema.SET_BY} | {"optim.in_backward"}
    assert declared(schema.PlanKeys) - groups == (here | extra) - groups


def test_config_key_without_a_declaration_in_the_schema_is_refused():
    cfg = composed([])
    with pytest.raises(Refused, match="there is no key patience"):
        settled(OmegaConf.merge(OmegaConf.create({"patience": 3}, flags={"struct": False}), cfg))


@pytest.mark.parametrize(
    "identity",
    ["torch.optim.AdamW", "lowmem.techniques.scheduler.cosine", "lowmem.techniques.loss.cross_entropy.Chunked", "gpt2"],
)
def test_arguments_of_a_class_named_in_a_yaml_all_have_descriptions(identity):
    kinds = {field.alias: field for field in schema.arguments(identity).model_fields.values()}
    assert all(field.description for field in kinds.values())
    assert not schema.arguments("no.yaml.names.it").model_fields


OWN = ("+loss.path=[a,b]", "+loss.target=3", "+loss.alpha=-1", "+loss.dropout=1.0", "+loss.weight=0")


@pytest.fixture
def a_yaml_of_ones_own(tmp_path, monkeypatch):
    """Yields a function that takes the name of a package, and returns overrides that choose the class `Weighted` of
    this package. For the schema, a yaml file that names this class replaces the files of conf/."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(package):
        (tmp_path / "mine.py").write_text(
            "def Weighted(path, target, alpha, dropout, weight, rows=1, lr=0):\n    ...\n"
        )
        keys = "path: a\ntarget: b\nalpha: 1\ndropout: 0.5\nweight: 1\nlr: ${lr}\n"
        (tmp_path / "weighted.yaml").write_text(f"_target_: {package}.Weighted\n{keys}")
        monkeypatch.setattr(schema, "_texts", lambda: ((tmp_path / "weighted.yaml").read_text(),))
        schema.arguments.cache_clear()
        return ["loss=chunked", f"loss._target_={package}.Weighted", "+loss.lr=1e-3", *OWN]

    yield written
    schema.arguments.cache_clear()


def test_arguments_of_a_user_class_are_not_checked_by_lowmem_rules(a_yaml_of_ones_own):
    run = typed_run(a_yaml_of_ones_own("mine"))
    checked(run, {})
    assert run.loss.plain()["path"] == ["a", "b"] and run.loss.plain()["alpha"] == -1


def test_paths_of_a_user_source_are_not_checked():
    lines = ["data=text", "data._target_=mine.Source", "data.path=s3://bucket/texts", "data.on_error=retry"]
    check.check_places(typed_run(lines))


def test_lowmem_class_arguments_of_wrong_types_are_all_refused(a_yaml_of_ones_own):
    with pytest.raises(Refused) as refusal:
        typed_run(a_yaml_of_ones_own("lowmem"))
    assert all(line.split("=")[0].lstrip("+") in str(refusal.value) for line in OWN)


def test_user_argument_that_interpolates_lr_is_refused_if_it_is_not_a_number(a_yaml_of_ones_own):
    with pytest.raises(Refused, match=r"loss\.lr=fast"):
        typed_run([*a_yaml_of_ones_own("mine"), "loss.lr=fast"])


@pytest.mark.parametrize("one", ["resume", "evaluate", "export", "generate"])  # a command uses only one of these keys
def test_number_typed_for_a_text_key_stays_text(one):
    others = {"resume", "evaluate", "export", "generate"} - {one} | {
        "may_change",
        "drive",
    }  # may_change takes no number; drive is a key of plan.py
    others |= set() if one == "generate" else {"prompt"}  # prompt needs generate
    keys = [key for key in TEXTS if key not in others]
    lines = ["data=jsonl", "adapter=lora", "weights=streamed", *(f"{key}={number}" for number, key in enumerate(keys))]
    cfg = composed(cli.prepare(lines), whole=True)
    assert [OmegaConf.select(cfg, key) for key in keys] == [str(number) for number in range(len(keys))]


# --- drawn from conf/ ------------------------------------------------------------------------------------------------

GROUPS = sorted(folder.name for folder in CONF.iterdir() if is_group(folder.name))
CHOICES = {group: sorted(file.stem for file in (CONF / group).glob("*.yaml")) for group in GROUPS}


GIVEN = {  # choice -> overrides that it needs
    "data=text": ["data.path=x"],
    "model=hf": ["model.name=x"],
    "accumulation=by_epoch": ["accumulation.sizes={0: 1, 1: 2}"],
    "accumulation=by_step": ["accumulation.sizes={0: 1, 1: 2}"],
}


def keys() -> list[tuple[str, object, list[str]]]:
    """Returns (key, value, overrides that the key needs) for every key in the yaml files that a run reads."""
    found = []
    for file in (CONF / "config.yaml", *(file for group in GROUPS for file in sorted((CONF / group).glob("*.yaml")))):
        whole, choice = OmegaConf.to_container(OmegaConf.load(file)), f"{file.parent.name}={file.stem}"
        beside = [] if file.parent == CONF else [choice, *GIVEN.get(choice, [])]
        prefix = "" if file.parent == CONF or "@package _global_" in file.read_text() else f"{file.parent.name}."
        for key in keys_of(whole):
            value = reduce(lambda node, part: node[part], key.split("."), whole)
            found.append((prefix + key, value, beside))
    return [one for one in found if one[0].split(".")[0] not in ("hydra", "defaults")]


KEYS = keys()
VALUES = (
    *("abc", "null", "true", "False", "1", "0", "-1", "7", "1.5", "1e-3", "1e400", "nan", "inf", "007", "'7'", "1_000"),
    *("[]", "[a]", "[1,2]", "[0.5,0.5]", "{}", "{a: 1}", "{0: 1}", "12GiB", "12GB", "", "a b", "a,b", "???", "auto"),
    *("${nope}", "${seed}", "${lr}", "${memory}", "${", "${oc.env:NOPE}", "${now:}", "(", "'", "\\", *AWKWARD),
)


@st.composite
def misspelt(draw, words):
    word = draw(st.sampled_from(sorted(words)))
    place = draw(st.integers(0, len(word) - 1))
    return word[:place] + draw(st.sampled_from(["", "x", "_", ".", "/"])) + word[place + 1 :]


@st.composite
def lines(draw):
    """Draws overrides of one choice or key. Each override has its name and value from conf/, or an unknown, misspelt or
    removed name, or another value."""
    value = draw(st.one_of(st.sampled_from(VALUES), text_values()))
    group = draw(st.sampled_from(GROUPS))
    choice = draw(st.sampled_from(CHOICES[group]))
    key, default, beside = draw(st.sampled_from(KEYS))
    sign = draw(st.sampled_from(["", "", "", "+", "++", "~"]))
    new = draw(st.sampled_from(["trainer.", "callbacks.x.", "optim.", "model.", "logger.", ""])) + "anything"
    chosen = [f"{group}={choice}", *GIVEN.get(f"{group}={choice}", [])]
    right = [chosen] * 3 + [[*beside, f"{key}={as_typed(default)}"]] * 2 + [["++trainer.detect_anomaly=true"]]
    wrong = [[f"{sign}{group}={draw(st.one_of(misspelt(CHOICES[group]), st.just(value)))}"], [f"~{group}"]]
    wrong += [[*beside, f"{sign}{key}={value}"]] * 5 + [[*beside, f"{draw(misspelt([key]))}={value}"]]
    wrong += [[*beside, f"~{key}"], [f"+{new}={value}"], [f"{draw(text_values())}={value}"]]
    return draw(st.sampled_from(right * 3 + wrong))


def as_typed(value: object) -> str:
    shown = {None: "null", True: "true", False: "false"}
    return shown[value] if value is None or isinstance(value, bool) else str(value)


def outcome(arguments: list[str]) -> str:
    """Runs the checks that a command makes before it reads data and creates weights.

    Returns:
        "runs", or a text that names the check that refused the command line.

    Raises:
        Exception: any error except `Refused`. A user would see its traceback.
    """
    try:
        run = typed_run(arguments)
    except Refused as refusal:
        return _sentences(str(refusal), "refused by the words")
    try:
        checked(run, {})
        windows = run.windows
    except Refused as refusal:
        return _sentences(str(refusal), "refused by the classes")
    run = run.knowing(output_dir="x", device=run.runs_on)
    assert windows is None or windows.largest >= 1
    for node in (
        run.loss,
        run.scheduler,
        run.gradient_checkpointing,
        *run.plugins,
        *run.callbacks.values(),
    ):
        instantiate(node)
    optimizer(run)(torch.nn.Linear(4, 4))
    return "runs"


def _sentences(said: str, what: str) -> str:
    for line in said.split("\n"):
        assert re.search(r"\.[\"']?$", line) and "Traceback" not in line and "hydra.cc" not in line, said
    assert said.count("\n") < 8, said
    return what


def holds(parts: list[list[str]]) -> None:
    event(outcome([line for part in parts for line in part]))


DRAWN = given(st.lists(lines(), min_size=1, max_size=3))
# A case takes a quarter of a second, so it would take minutes to shrink a failing case.
SLOWLY = {
    "phases": [Phase.generate],
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}

test_ten_random_command_lines_are_built_or_refused_with_full_sentences = settings(max_examples=10, **SLOWLY)(
    DRAWN(holds)
)
test_five_hundred_random_command_lines_are_built_or_refused_with_full_sentences = pytest.mark.matrix(
    settings(max_examples=500, **SLOWLY)(DRAWN(holds))
)
