"""Tests README.md and docs/: their commands run, and their names, files and figures exist and are current."""

import inspect
import json
import os
import random
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from benchmarks.loops import RECIPES
from benchmarks.pages import tables
from benchmarks.side_by_side import summary
from benchmarks.techniques import ROWS, table, table_of_pairs
from lightning.pytorch import Trainer

import pages
from conftest import ROOT
from pages import DOCS, README
from test_parity import REFUSED_PAIRS

pytestmark = pytest.mark.docs

TEXT = README.read_text()
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [README, *DOCS]
EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
# test_docs.py follows docs/add-a-technique.md in a copy of the repository
FOLLOWED = ROOT / "docs" / "add-a-technique.md"
COMMANDS = list(dict.fromkeys(c for page in PAGES if page != FOLLOWED for c in pages.commands(page.read_text())))


def docs(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


# --- the index -------------------------------------------------------------------------------------------------------


def test_docs_index_lists_every_page():
    assert "](docs/README.md)" in TEXT
    listed = re.findall(r"^\d+\. \[[^]]+\]\(([\w-]+)\.md\)", docs("README"), re.MULTILINE)
    others = [page for page in DOCS if page.stem != "README"]
    assert sorted(listed) == sorted(page.stem for page in others)


def test_agents_page_names_every_folder_of_the_source():
    page = (ROOT / "AGENTS.md").read_text()
    assert set(re.findall(r"- (\w+)/ ", page)) == {
        room.name for room in (ROOT / "src/lowmem").iterdir() if room.is_dir()
    } - {"__pycache__"}


# --- commands --------------------------------------------------------------------------------------------------------


def test_search_for_commands_finds_commands_in_readme_and_in_four_pages_of_docs():
    assert "python train.py precision=16 optim=adam8bit" in COMMANDS
    assert "python train.py -m precision=32,16,bf16 optim=adamw,adam8bit,adafactor" in COMMANDS
    assert len(COMMANDS) > 15
    for page in ("README", "techniques", "planner", "masters", "sweeps"):
        assert pages.commands(README.read_text() if page == "README" else docs(page))


@EVERY
def test_every_documented_command_composes_and_is_not_refused(page):
    if page != FOLLOWED:
        assert not pages.refused(page.read_text())


WORDS = ("we", "think", "that", "a", "day", "is", "too", "short", "for", "what", "it", "holds")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the working folder of a new user. It contains text files, and the runs whose dated folders the pages
    name."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "notes").mkdir()
    for name in ("examples", "docs"):  # as in the repository
        (folder / name).symlink_to(ROOT / name)
    for number in range(20):
        thoughts = random.Random(number).choices(WORDS, k=20_000)
        (folder / "notes" / f"{number}.txt").write_text(" ".join(thoughts))
    day = "2026-01-31"
    quick = ("val_sequences=16", "plan=off")  # a full evaluation would take longer than one step
    as_typed(f"python train.py max_steps=1 hydra.run.dir=outputs/{day}/12-00-00", folder, *quick)
    as_typed(f"python train.py max_steps=1 hydra.run.dir=outputs/{day}/13-00-00", folder, *quick)
    as_typed(f"python train.py -m max_steps=1,2 hydra.sweep.dir=multirun/{day}/12-00-00", folder, *quick)
    return folder


def as_typed(command: str, folder, *more: str) -> str:
    words = shlex.split(command)
    words = [sys.executable, str(ROOT / words[1]), *words[2:], *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "offline"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# Published weights are not available in tests, so commands that name them train two small layers with random weights.
THIN = ["n_layer=2", "n_embd=64", "n_head=2", "vocab_size=4096"]
THIN_LLAMA = ["num_hidden_layers=2", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4"]
THIN_LLAMA += ["num_key_value_heads=2", "head_dim=16", "vocab_size=4096", "bos_token_id=null", "eos_token_id=null"]


def says_only(command: str) -> bool:
    return "--help" in command or " -sc " in command


def with_choices(command: str) -> str:
    """Returns the command followed by the choices of its experiment, except choices of groups that the command itself
    sets."""
    named = re.search(r"experiment=(\w+)", command)
    preset = ROOT / "conf" / "experiment" / f"{named[1]}.yaml" if named else None
    chosen = re.findall(r"override /(\w+): (\S+)", preset.read_text()) if preset and preset.exists() else []
    return " ".join([command, *(f"{group}={choice}" for group, choice in chosen if f" {group}=" not in command)])


def beside(command: str) -> list[str]:
    """Returns the overrides that limit a training command to two steps, with a small model if the command names
    published weights. Returns an empty list for other commands."""
    command = with_choices(command)
    if "train.py" not in command or "sweep.resume" in command or says_only(command):
        return []
    if "generate=" in command or "show=" in command:
        return []
    more = ["max_steps=2", "val_sequences=16"]
    thin = THIN_LLAMA if re.search(r"llama|smollm2", command) else THIN if re.search(r"gpt2", command) else []
    small = ["model.pretrained=false", "plan=off" if "plan=" not in command else "seq_len=64"] if thin else []
    if "experiment=gpt2_xl" in command or "llama" in command:
        small += [
            "seq_len=256" if "data=chat" in command else "seq_len=16"
        ]  # a row must be long enough to reach the answer
    return [*more, *small, *(f"model.architecture.{key}" for key in thin)]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_readme_and_docs_exits_with_0_and_prints_its_result(command, folder):
    said = as_typed(command, folder, *beside(command))
    if says_only(command) or "generate=" in command:
        assert said.strip()
    elif "show=" in command:
        assert "tokens learned" in said
    elif "plan.py" in command:
        assert "planned in" in said
    elif "compare.py" in command or " -m " in command or "sweep.resume" in command:
        heading = re.search(r"^ +validation +bits per .*\n.* loss +byte ", said, re.MULTILINE)
        assert heading and "failed" not in said
    elif " export=" in command:
        assert "wrote outputs/" in said
    else:
        assert "peak device memory" in said


def python_block(start: str) -> str:
    """Returns the first Python block of docs/sweeps.md in which a line begins with `start`."""
    blocks = re.findall(r"```python\n(.*?)```", docs("sweeps"), re.DOTALL)
    return next(block for block in blocks if f"\n{start}" in block)


def test_documented_optuna_example_reads_the_loss_of_each_trial(folder, monkeypatch):
    """A stand-in for optuna, which is not a dependency, runs one trial."""
    lines = ["max_steps=2", "val_sequences=16"]
    losses = []

    class Study:
        def optimize(self, objective, n_trials):
            losses.append(objective(SimpleNamespace(number=0, suggest_float=lambda name, low, high, log: low)))

    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: run([command[0], ROOT / command[1], *command[2:], *lines], **how)
    )
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=Study))
    monkeypatch.chdir(folder)
    exec(python_block("import optuna"), {})
    assert 4 < losses[0] < 10


def test_documented_notebook_example_trains_and_writes_a_summary(tmp_path, small, monkeypatch):
    """The Python block of the page is run with a smaller model and another folder."""
    import hydra

    block = python_block("from hydra")
    block = block.replace("outputs/notebook", str(tmp_path / "run")).replace(
        'config_path="conf"', f'config_dir="{ROOT}/conf"'
    )
    block = block.replace("import compose, initialize\n", "import compose, initialize_config_dir as initialize\n")
    real = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda name, lines: real(name, [*lines, *small, "max_steps=2"]))
    scope = {}
    exec(block, scope)
    assert scope["summary"]["steps"] == 2 and (tmp_path / "run" / "summary.json").exists()


# --- names, files and figures ----------------------------------------------------------------------------------------


@EVERY
def test_every_documented_key_and_choice_exists_in_conf(page):
    assert not pages.unknown_keys(page.read_text())


@EVERY
def test_every_name_in_backticks_exists_in_the_code(page):
    assert not pages.unknown_names(page.read_text())


@EVERY
def test_every_documented_link_path_and_make_target_exists(page):
    assert not pages.missing_files(page.read_text(), page.parent)


@EVERY
def test_every_documented_figure_and_table_equals_the_results(page):
    assert not pages.wrong_figures(page.read_text(), page.parent)


@pytest.mark.parametrize(
    ("checker", "wrong"),
    [
        ("refused", "    python train.py optim=adam9bit"),
        ("refused", "Type `python plan.py model=gpt2-xl gpus=12GiB`."),
        ("refused", "    python train.py -m precision=32,17"),
        ("refused", "    python train.py optim.in_backward=true"),
        ("unknown_keys", "Type `optim=adam9bit`."),
        ("unknown_keys", "    python train.py experiment=baseline,combined"),
        ("unknown_keys", "Type `-m optim='glob(adam*),glob(no*)'`."),
        ("unknown_keys", "Type `loss=chunked loss.row=7` for less."),
        ("unknown_keys", "| `optimizer=adam8bit` | 6 B |"),
        ("unknown_keys", "The card's size is `memory.limits`."),
        ("unknown_keys", "```sh\npython train.py 'learning_rate=tag(log,interval(1e-4,1e-2))'\n```"),
        ("unknown_names", "It evaluates every `val_evry` steps."),
        ("missing_files", "![where the bytes are](docs/no-such-picture.png)"),
        ("missing_files", "[how](docs/no-such-page.md#there)"),
        ("missing_files", "[`as_card.py`](src/lowmem/plan/tracing/trace.py)"),
        ("missing_files", "What src/lowmem/no_such_file.py does."),
        ("missing_files", "`python -m benchmarks.no_such_benchmark`"),
        ("missing_files", "`python -m benchmarks.techniques --no-such-flag`"),
        ("missing_files", "    make dance"),
        ("wrong_figures", "[Kendall's tau is 0.94](benchmarks/results/plan_time.md)"),
        ("wrong_figures", "off by [-26.8%](benchmarks/results/plan_error.md)"),
        (
            "wrong_figures",
            "<!-- table 1 of benchmarks/results/speed.md -->\n| row | ratio |\n|---|---|\n| sqrt | 1.01 |\n",
        ),
    ],
)
def test_page_checkers_find_a_planted_error(checker, wrong):
    check = getattr(pages, checker)
    told = check(wrong, ROOT) if checker in ("missing_files", "wrong_figures") else check(wrong)
    assert len(told) == 1, told


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_page_checkers_find_a_single_changed_digit_of_a_documented_table(page):
    """Changes the last digit of every table below a mark, which shows that tables are compared up to their last
    number."""
    text = page.read_text()
    for mark in re.finditer(r"<!-- table .*-->\n((?:\|.*\n)+)", text):
        at = max(n for n in range(mark.start(1), mark.end(1)) if text[n].isdigit())
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        assert pages.wrong_figures(changed, page.parent)


def test_result_tables_on_the_pages_stand_below_a_mark_with_their_file():
    """`python -m benchmarks.pages` updates only tables below such a mark."""
    for page, results in {
        "techniques": ["techniques"],
        "planner": ["plans"],
        "planner-accuracy": ["plan_error", "published"],
        "masters": ["host_optimizer", "gpt2_xl"],
        "speed": ["side_by_side", "speed"],
        "data": ["reach"],
    }.items():
        for name in results:
            (first, *others) = tables((RESULTS / f"{name}.md").read_text())
            assert any(f"results/{name}.md -->\n{one}" in docs(page) for one in (first, *others)), name


def test_summary_on_the_speed_page_equals_the_side_by_side_results_with_equal_bits_for_each_recipe():
    rounds = json.loads((RESULTS / "side_by_side.json").read_text())["rounds"]
    assert summary(rounds) + "\n" in docs("speed"), "python -m benchmarks.side_by_side, then python -m benchmarks.pages"
    assert summary(rounds).count("equal bits") == len(RECIPES)


def test_techniques_page_has_the_tables_of_the_stored_results_which_list_every_current_technique():
    found = json.loads((RESULTS / "techniques.json").read_text())
    again = "a technique is new or gone: python -m benchmarks.techniques --table, then python -m benchmarks.pages"
    assert found["rounds"].keys() <= found["refused"].keys() == ROWS.keys(), again
    for written in (table(found["rounds"]), table_of_pairs(found["refused"])):
        assert written + "\n" in docs("techniques"), again


def test_pairs_stored_as_refused_in_techniques_json_equal_the_refused_pairs_of_the_parity_tests():
    """test_parity.py tests that no other pair is refused."""
    found = json.loads((RESULTS / "techniques.json").read_text())
    pairs = {frozenset((one, other)) for one, others in found["refused"].items() for other in others}
    assert (
        pairs == {pair for pair in REFUSED_PAIRS if pair <= ROWS.keys()} and len(pairs) > 10
    )  # without pairs of a default choice, which has no row


def test_planner_page_states_the_accuracy_of_plan_time_results_and_the_rates_of_the_code():
    from lowmem.plan.cost.machine import COMPUTE, MEMORY

    written = re.search(r"Kendall's\s+tau\s+is\s+([\d.]+)\]", docs("planner"))[1]
    results = (RESULTS / "plan_time.md").read_text()
    assert f"Kendall's tau {written} " in results
    median, worst = re.search(
        r"off by a factor of ([\d.]+) in the\s+median and ([\d.]+) at most\]", docs("planner")
    ).groups()
    assert f"a factor of {median} (median) and {worst} (worst" in results
    assert f"{100 * COMPUTE:.0f} % of the products and {100 * MEMORY:.0f} %\nof the bandwidth" in docs("planner")
    assert (
        f"fit these times best: {COMPUTE:.2f} of the rate of matrix products, {MEMORY:.2f} of the bandwidth" in results
    )


def test_documented_depth_from_which_sqrt_wins_is_the_square_of_the_documented_tensors_inside_a_block():
    page = docs("techniques")
    interiors = [int(n) for n in re.search(r"\((\d+) to (\d+) in", page).groups()]
    depths = [int(n.replace(",", "")) for n in re.search(r"from\s+([\d,]+) to ([\d,]+) blocks", page).groups()]
    assert interiors == [22, 34]  # measured in test_policies.py
    for interior, depth in zip(interiors, depths, strict=True):
        assert depth == pytest.approx(interior**2, rel=0.05)


def test_readme_and_docs_contain_no_placeholder():
    for page in PAGES:
        assert not re.search(r"\bM_\w+|OVERHEAD_TABLE|TECHNIQUES_MACHINE|\b(TODO|TBD|FIXME)\b", page.read_text())


def test_every_refusal_names_a_documented_key_and_valid_advice():
    from lowmem.config.refusals import REFUSALS

    named = {key for page in PAGES for key, _ in pages.overrides(page.read_text())}
    named |= {
        f"trainer.{argument}" for argument in inspect.signature(Trainer).parameters
    }  # arguments of Lightning's Trainer
    for refusal in REFUSALS:
        assert re.match(r"(?:This )?([\w.]+)", refusal.says)[1] in named
        assert "ype " in refusal.says and not pages.unknown_keys(f"`{refusal.says}`")


def test_charts_named_in_readme_and_docs_are_logged_by_a_run(fit, monkeypatch):
    from lightning.pytorch.loggers import CSVLogger

    logged = set()
    monkeypatch.setattr(CSVLogger, "log_metrics", lambda self, metrics, step=None: logged.update(metrics))
    monkeypatch.setattr(
        "lowmem.report.picture.send", lambda *_: logged.update(("memory/picture", "memory/by_category"))
    )
    fit("+logger.csv._target_=lightning.pytorch.loggers.CSVLogger", "+logger.csv.save_dir=${output_dir}")
    named = {
        name for page in PAGES for name in pages.inline(page.read_text()) if re.match(r"(train|memory)/\w+$", name)
    }
    assert len(named) > 6 and named <= logged


def test_first_two_readme_commands_learn_more_than_a_trigram_model(folder):
    """The commands run without further overrides. Both runs must need less than 80 % of the bits per byte of the
    trigram model, and differ from each other by at most 1 %."""
    from benchmarks.trigram import trigram_bits_per_byte

    from lowmem.data.sources.text_files import stdlib

    files = stdlib(0.05)
    bar = trigram_bits_per_byte(*([file.read_bytes() for file in split] for split in (files.train, files.val)))
    found = []
    for command in ("python train.py", "python train.py precision=16 optim=adam8bit"):
        said = as_typed(command, folder)
        assert "A sample:\n" in said
        run = re.search(r"^wrote (.*)/: .*summary\.json", said, re.MULTILINE)[1]
        summary = json.loads((folder / run / "summary.json").read_text())
        assert summary["steps"] == 450
        found.append(summary["bits_per_byte"])
    assert max(found) < 0.8 * bar < 0.8 * 8 and found[1] == pytest.approx(found[0], rel=0.01), (found, bar)
